"""TensorFlow has an environment of its own (`make test-tensorflow`); others skip this folder."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tensor_backends import version_folder

collect_ignore_glob = [] if find_spec("tensorflow") else ["test_*.py"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    return version_folder(tmp_path)
