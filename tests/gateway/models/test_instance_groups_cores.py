"""The CPU cores of instances, by the host policies of their groups."""

import logging
from pathlib import Path

import pytest

from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.instance_groups import Placement, cores_of
from tests.registries import ScriptedBackend, Start, write

POLICIES = {
    "cpu": frozenset({0}),
    "gpu_1": frozenset({1}),
    "model": frozenset({2}),
    "own": frozenset({3}),
}
CONFIG = ModelConfig(name="m", backend="scripted")


class Keeping(ScriptedBackend):
    """A backend whose instances keep to cores."""

    keeps_to_cores = True


@pytest.fixture
async def backend() -> ScriptedBackend:
    return Keeping()


def place(kind: InstanceKind, policy: str = "", device: int = 0) -> Placement:
    return Placement(name="m_0", group=InstanceGroup(kind=kind, host_policy=policy), device=device)


@pytest.mark.parametrize(
    ("where", "cores"),
    [
        (place(InstanceKind.KIND_CPU), {0}),
        (place(InstanceKind.KIND_GPU, device=1), {1}),
        (place(InstanceKind.KIND_GPU, device=0), set()),
        (place(InstanceKind.KIND_MODEL), {2}),
        (place(InstanceKind.KIND_CPU, "own"), {3}),
    ],
)
def test_a_group_without_a_policy_has_that_of_its_kind(where: Placement, cores: set[int]) -> None:
    assert cores_of(where, CONFIG, Keeping(), POLICIES) == cores


def test_a_policy_without_settings_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not cores_of(place(InstanceKind.KIND_CPU, "other"), CONFIG, Keeping(), POLICIES)
    (record,) = caplog.records
    assert (record.levelno, vars(record)["host_policy"]) == (logging.WARNING, "other")


def test_a_backend_that_cannot_keep_to_cores_is_refused_by_name() -> None:
    with pytest.raises(InferenceError) as caught:
        cores_of(place(InstanceKind.KIND_CPU, "own"), CONFIG, ScriptedBackend(), POLICIES)
    assert caught.value.code is Code.UNSUPPORTED
    assert "host policy 'own'" in caught.value.message
    assert "backend 'scripted'" in caught.value.message


async def test_an_instance_gets_the_cores_of_its_policy(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    groups = (
        'instance_group { kind: KIND_CPU } instance_group { kind: KIND_CPU host_policy: "own" }'
    )
    write(tmp_path, "m", 1, more=groups)
    await start(host_policies=POLICIES)
    assert [each.cpu_cores for each in backend.contexts["m 1"]] == [{0}, {3}]


async def test_an_ensemble_needs_no_cores(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "m", 1)
    text = """
        platform: "ensemble"
        input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        output { name: "text_output" data_type: TYPE_STRING dims: 1 }
        ensemble_scheduling { step { model_name: "m" model_version: -1
            input_map { key: "text_input" value: "text_input" }
            output_map { key: "text_output" value: "text_output" } } }
    """
    write(tmp_path, "e", 1, text=text)
    control = await start(host_policies=POLICIES)
    assert control.registry.failures() == {}
