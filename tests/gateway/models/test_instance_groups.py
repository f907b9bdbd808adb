"""A model gets the instances that Triton would give it."""

from dataclasses import replace

import pytest

from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import InferenceError
from gateway.models.instance_groups import (
    NO_GPUS,
    UsableGpus,
    check_instance_groups,
    fill_instance_groups,
)

AUTO, CPU, GPU, MODEL = (
    InstanceKind.KIND_AUTO,
    InstanceKind.KIND_CPU,
    InstanceKind.KIND_GPU,
    InstanceKind.KIND_MODEL,
)


def filled(
    *groups: InstanceGroup, gpus: tuple[int, ...] = (), backend: str = "python"
) -> tuple[InstanceGroup, ...]:
    config = ModelConfig(name="m", backend=backend, instance_group=groups)
    return fill_instance_groups(config, UsableGpus(gpus))


@pytest.mark.parametrize(
    ("gpus", "kind"), [((), CPU), ((0, 1), GPU)], ids=["without GPUs", "with GPUs"]
)
def test_a_model_without_groups_gets_one_that_has_its_name(
    gpus: tuple[int, ...], kind: InstanceKind
) -> None:
    assert filled(gpus=gpus) == (InstanceGroup(name="m", kind=kind, count=1, gpus=gpus),)


def test_a_group_without_name_is_numbered_by_its_place() -> None:
    groups = filled(InstanceGroup(), InstanceGroup(name="own"), InstanceGroup())
    assert [group.name for group in groups] == ["m_0", "own", "m_2"]


@pytest.mark.parametrize("count", [0, -3])
@pytest.mark.parametrize(
    ("backend", "kind", "expected"),
    [
        ("python", CPU, 1),
        ("onnxruntime", CPU, 2),
        ("tensorflow", CPU, 2),
        ("onnxruntime", MODEL, 1),
    ],
)
def test_a_group_without_count_has_the_default_of_its_backend(
    count: int, backend: str, kind: InstanceKind, expected: int
) -> None:
    [group] = filled(InstanceGroup(kind=kind, count=count), backend=backend)
    assert group.count == expected


def test_a_count_that_is_given_stays() -> None:
    [group] = filled(InstanceGroup(kind=CPU, count=1), backend="onnxruntime")
    assert group.count == 1


@pytest.mark.parametrize("backend", ["vllm", "tensorrtllm"])
@pytest.mark.parametrize("usable", [(), (0, 1)])
def test_an_engine_that_chooses_its_gpus_is_there_once(
    backend: str, usable: tuple[int, ...]
) -> None:
    for groups in ((), (InstanceGroup(),)):
        [group] = filled(*groups, gpus=usable, backend=backend)
        assert (group.kind, group.gpus, group.count) == (MODEL, (), 1)
    [group] = filled(InstanceGroup(gpus=(1,)), gpus=(0, 1), backend=backend)
    assert (group.kind, group.gpus) == (GPU, (1,))


@pytest.mark.parametrize(
    ("listed", "usable", "kind", "gpus"),
    [
        ((), (), CPU, ()),
        ((), (0, 1), GPU, (0, 1)),
        ((1,), (0, 1), GPU, (1,)),
        ((2,), (0, 1), CPU, (2,)),
        ((0,), (), CPU, (0,)),
    ],
)
def test_auto_is_the_gpu_where_every_listed_one_is_usable(
    listed: tuple[int, ...],
    usable: tuple[int, ...],
    kind: InstanceKind,
    gpus: tuple[int, ...],
) -> None:
    [group] = filled(InstanceGroup(kind=AUTO, gpus=listed), gpus=usable)
    assert (group.kind, group.gpus) == (kind, gpus)


@pytest.mark.parametrize(
    ("group", "kind", "gpus"),
    [
        (InstanceGroup(), CPU, ()),
        (InstanceGroup(kind=GPU), GPU, (0, 1)),  # asked for: the load says what is missing
        (InstanceGroup(gpus=(1,)), GPU, (1,)),
    ],
)
def test_a_runtime_without_gpus_gets_the_cpu_unless_a_gpu_is_asked_for(
    group: InstanceGroup, kind: InstanceKind, gpus: tuple[int, ...]
) -> None:
    usable = UsableGpus((0, 1), serve=lambda backend: backend != "onnxruntime")
    config = ModelConfig(name="m", backend="onnxruntime", instance_group=(group,))
    [found] = fill_instance_groups(config, usable)
    assert (found.kind, found.gpus) == (kind, gpus)
    [found] = fill_instance_groups(replace(config, backend="pytorch"), usable)
    assert found.kind is GPU


def test_a_runtime_is_not_asked_about_gpus_that_are_not_there() -> None:
    asked: list[str] = []
    gpus = UsableGpus((), serve=lambda backend: bool(asked.append(backend)))
    config = ModelConfig(name="m", backend="onnxruntime")
    assert fill_instance_groups(config, gpus)[0].kind is CPU
    assert asked == []


@pytest.mark.parametrize("minimum", [(6, 0), (7, 5)])
def test_a_refusal_names_the_compute_capability_that_is_needed(minimum: tuple[int, int]) -> None:
    config = ModelConfig(name="m", instance_group=(InstanceGroup(kind=GPU, gpus=(1,)),))
    with pytest.raises(InferenceError, match=f"of {minimum[0]}.{minimum[1]}00000 are: 0"):
        check_instance_groups(config, UsableGpus((0,), minimum))


@pytest.mark.parametrize(
    ("group", "gpus"),
    [
        (InstanceGroup(kind=CPU), ()),
        (InstanceGroup(kind=CPU, count=1024), ()),
        (InstanceGroup(kind=MODEL), ()),
        (InstanceGroup(kind=GPU, gpus=(1,)), (0, 1)),
        (InstanceGroup(kind=GPU), (0,)),
    ],
)
def test_a_group_that_this_machine_can_have_is_accepted(
    group: InstanceGroup, gpus: tuple[int, ...]
) -> None:
    config = ModelConfig(name="m", instance_group=filled(group, gpus=gpus))
    check_instance_groups(config, UsableGpus(gpus))


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        (InstanceGroup(kind=CPU, count=1025), "has a count of 1025, expected at most 1024"),
        (InstanceGroup(kind=CPU, gpus=(0,)), "has kind KIND_CPU but specifies one or more GPUs"),
        (
            InstanceGroup(kind=MODEL, gpus=(0,)),
            "has kind KIND_MODEL but specifies one or more GPUs",
        ),
        (
            InstanceGroup(kind=GPU, gpus=(0, 7)),
            "specifies invalid or unsupported gpu id 7. GPUs with at least the minimum required "
            "CUDA compute compatibility of 6.000000 are: 0,1",
        ),
        (
            InstanceGroup(profile=("0",)),
            "and platform specifies profile field which is only supported for TensorRT models",
        ),
    ],
)
def test_a_group_that_contradicts_itself_or_the_machine_is_refused(
    group: InstanceGroup, problem: str
) -> None:
    config = ModelConfig(name="m", instance_group=(replace(group, name="g"),))
    with pytest.raises(InferenceError) as caught:
        check_instance_groups(config, UsableGpus((0, 1)))
    assert caught.value.message == f"instance group g of model m {problem}"


def test_a_gpu_group_is_refused_where_there_is_no_gpu() -> None:
    config = ModelConfig(name="m", instance_group=filled(InstanceGroup(name="g", kind=GPU)))
    with pytest.raises(InferenceError) as caught:
        check_instance_groups(config, NO_GPUS)
    assert caught.value.message == (
        "instance group g of model m has kind KIND_GPU but no GPUs are available"
    )
