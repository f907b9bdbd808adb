"""One Ray cluster for all tests of this folder, which are skipped without Ray."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import needs
from tests.fleet.nodes import RayNodes, environment


@pytest.fixture(scope="session", autouse=True)
def ray() -> None:
    """Ray is installed: in CI each test fails without it."""
    if find_spec("ray") is None:
        needs.lacking("Ray", "run `make test-ray`")


@pytest.fixture(scope="session")
def nodes(ray: None) -> Iterator[RayNodes]:
    """A cluster with a node in the zone a."""
    # Paths of sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(Path(folder)).items():
            patch.setenv(name, value)
        found = RayNodes("a")
        yield found
        found.shutdown()
