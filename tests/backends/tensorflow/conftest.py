"""The folder of a model."""

from pathlib import Path

import pytest

from tests.tensor_backends import version_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    return version_folder(tmp_path)
