"""One Ray cluster for all tests of this folder, which are skipped without Ray."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import needs
from tests.fleet.fake_ray import FakeRay
from tests.fleet.nodes import RayNodes, environment


@pytest.fixture(scope="session", autouse=True)
def ray() -> Iterator[None]:
    """Ray is installed, and has the environment of the cluster when it is imported.

    In CI each test fails without it.
    """
    if find_spec("ray") is None:
        needs.lacking("Ray", "run `make test-ray`")
    # Paths of sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(Path(folder)).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def nodes(ray: None) -> Iterator[RayNodes]:
    """A cluster with a node in the zone a."""
    found = RayNodes("a")
    yield found
    found.shutdown()


@pytest.fixture
def fake(ray: None, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Calls of Ray that the test answers."""
    from gateway.fleet import ray_cluster, ray_state

    found = FakeRay()
    monkeypatch.setattr(ray_cluster, "ray", found)
    monkeypatch.setattr(ray_cluster, "PlacementGroupSchedulingStrategy", lambda *given: None)
    for module, name in (
        (ray_cluster, "placement_group"),
        (ray_cluster, "get_placement_group"),
        (ray_cluster, "remove_placement_group"),
        (ray_state, "placement_group_table"),
        (ray_state, "list_named_actors"),
    ):
        monkeypatch.setattr(module, name, getattr(found, name))
    return found
