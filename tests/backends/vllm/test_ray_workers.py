"""The placement group of a replica reaches the Ray workers of its engine, without Ray."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from backends.vllm.ray_workers import hand_group
from backends.vllm.settings import EngineModel
from backends.vllm.start_reports import StartReporter

GROUP = "0a0b"


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in place of Ray's: a group is its id."""
    package, groups = ModuleType("ray"), ModuleType("ray.util.placement_group")
    package.PlacementGroupID = SimpleNamespace(from_hex=bytes.fromhex)  # type: ignore[attr-defined]
    groups.PlacementGroup = bytes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("use_ray", "group", "found"),
    [(True, GROUP, b"\n\x0b"), (True, "", None), (False, GROUP, None)],
    ids=["workers-of-ray", "no-replica", "own-processes"],
)
def test_ray_workers_get_the_group_of_the_replica(use_ray: bool, group: str, found: object) -> None:
    parallel = SimpleNamespace(use_ray=use_ray, placement_group=None)
    hand_group(parallel, group)
    assert parallel.placement_group == found


@pytest.mark.vllm
@pytest.mark.usefixtures("without_ray")
def test_the_configuration_of_an_engine_has_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.vllm import engine

    parallel = SimpleNamespace(use_ray=True, placement_group=None)
    config = SimpleNamespace(parallel_config=parallel, additional_config={})
    arguments = SimpleNamespace(create_engine_config=lambda **options: config)
    monkeypatch.setattr(engine, "_arguments", lambda model, **more: (arguments, {}))
    model = EngineModel(
        name="m",
        version="1",
        arguments={},
        source="s",
        local=True,
        folders={},
        placement_group=GROUP,
    )
    assert engine.own_engine_config(model, StartReporter("m")) == (arguments, config)
    assert parallel.placement_group == b"\n\x0b"
