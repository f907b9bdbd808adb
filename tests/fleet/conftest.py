"""One Ray cluster for all tests of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.nodes import RayNodes, environment


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayNodes]:
    """A cluster with a node in the zone a."""
    # Paths of sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(Path(folder)).items():
            patch.setenv(name, value)
        found = RayNodes("a")
        yield found
        found.shutdown()
