"""Loads of plans: memory of instances, shared weights, and failures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.tensorrt.backend import TensorRtBackend
from gateway.config import InstanceKind, ModelConfig, SecondaryDevice
from gateway.config.optimization import CudaOptions, OptimizationPolicy, OptimizationPriority
from gateway.errors import Code, InferenceError
from tests.backends.tensorrt.conftest import (
    NEGATE,
    UP_TO_8,
    Load,
    M,
    X,
    ask,
    context,
    on,
    refused,
    request,
    save,
)

WHERE = "unable to load model 'm' on GPU 0 (Stand-in, compute capability 9.0): "
OUT_OF_MEMORY = 2
ONE = [[1.0] * 4]
MINUS_ONE = [{"y": [[-1.0] * 4]}]


def completing(backend: TensorRtBackend, folder: Path, config: ModelConfig = M) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        backend.complete(config, folder)
    return caught.value


# What instances have.


async def test_instances_on_a_gpu_share_the_weights(load: Load, folder: Path, world: Any) -> None:
    first, second = await load(NEGATE), await load(NEGATE)
    assert world.counts["engine"] == 1
    assert (world.counts["context"], world.counts["stream"]) == (2, 2)
    assert await ask(first, request(x=ONE)) == await ask(second, request(x=ONE)) == MINUS_ONE
    save(replace(NEGATE, weights=2000), folder)
    third = await load(replace(NEGATE, weights=2000))
    assert world.counts["engine"] == 2
    assert await ask(third, request(x=ONE)) == MINUS_ONE


async def test_each_gpu_has_weights_of_its_own(load: Load, world: Any) -> None:
    world.gpus = 2
    for device in (0, 1):
        instance = await load(NEGATE, on(M, gpus=(device,)), device)
        assert world.used(device) > 1000
        assert await ask(instance, request(x=ONE)) == MINUS_ONE
    assert world.counts["engine"] == 2


async def test_another_plan_may_be_meant_for_some_gpus(
    backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    config = replace(M, cc_model_filenames={"8.6": "ampere.plan"})
    save(replace(NEGATE, profiles=({"x": ([1, 4], [2, 4], [2, 4])},)), folder)
    save(replace(NEGATE, capability="8.6"), folder, "ampere.plan")
    assert backend.complete(config, folder).max_batch_size == 2
    world.capability = "8.6"
    assert backend.complete(config, folder).max_batch_size == 8


@pytest.mark.parametrize(
    ("strategy", "profile", "size"), [("STATIC", "0", 4096), ("ON_PROFILE_CHANGE", "0", 512)]
)
async def test_there_is_room_for_all_profiles_or_for_those_of_the_instance(
    load: Load, world: Any, strategy: str, profile: str, size: int
) -> None:
    plan = replace(NEGATE, profiles=(UP_TO_8, UP_TO_8), scratch=(512, 4096), weights=64)
    parameters = {"execution_context_allocation_strategy": strategy}
    await load(plan, replace(on(M, profile=(profile,)), parameters=parameters))
    assert world.used(0) == 64 + size


@pytest.mark.parametrize(
    ("priority", "number"),
    [
        (OptimizationPriority.PRIORITY_DEFAULT, 0),
        (OptimizationPriority.PRIORITY_MAX, -5),
        (OptimizationPriority.PRIORITY_MIN, 0),
    ],
)
async def test_streams_have_the_priority_that_the_config_asks_for(
    load: Load, world: Any, priority: OptimizationPriority, number: int
) -> None:
    await load(NEGATE, replace(M, optimization=OptimizationPolicy(priority=priority)))
    assert world.calls[f"priority {number}"] == 1


@pytest.mark.parametrize(("spins", "flags"), [(False, 3), (True, 2)])
async def test_waiting_threads_sleep_unless_the_config_makes_them_spin(
    load: Load, world: Any, spins: bool, flags: int
) -> None:
    policy = OptimizationPolicy(cuda=CudaOptions(busy_wait_events=spins))
    await load(NEGATE, replace(M, optimization=policy))
    assert world.calls[f"event {flags}"] == 1


# DLA.


@pytest.mark.parametrize("core", [0, 1])
async def test_layers_for_a_dla_execute_on_the_core_that_the_config_names(
    load: Load, world: Any, core: int
) -> None:
    world.dla_cores = 2
    config = on(M, secondary_devices=(SecondaryDevice(device_id=core),))
    instance = await load(replace(NEGATE, for_dla=True), config)
    assert world.calls[f"DLA {core}"] == world.calls["deserialize_cuda_engine"]
    assert await ask(instance, request(x=ONE)) == MINUS_ONE


async def test_each_dla_core_has_an_engine_of_its_own(load: Load, world: Any) -> None:
    world.dla_cores = 2
    for core in (0, 1, 1):
        await load(NEGATE, on(M, secondary_devices=(SecondaryDevice(device_id=core),)))
    await load(NEGATE)
    assert world.counts["engine"] == 3


@pytest.mark.parametrize(
    ("cores", "reason"),
    [
        (
            (2,),
            "unable to load model 'm': there is no DLA core 2 on GPU 0, TensorRT finds 2; "
            "correct `secondary_devices` of its instance_group",
        ),
        (
            (0, 1),
            "instance_group of model 'm' has the secondary devices KIND_NVDLA 0, KIND_NVDLA 1, "
            "expected one KIND_NVDLA whose device_id is not negative",
        ),
        (
            (-1,),
            "instance_group of model 'm' has the secondary devices KIND_NVDLA -1, expected one "
            "KIND_NVDLA whose device_id is not negative",
        ),
    ],
)
def test_unavailable_dla_cores_are_refused(
    backend: TensorRtBackend, folder: Path, world: Any, cores: tuple[int, ...], reason: str
) -> None:
    world.dla_cores = 2
    save(NEGATE, folder)
    devices = tuple(SecondaryDevice(device_id=core) for core in cores)
    error = completing(backend, folder, on(M, secondary_devices=devices))
    assert (error.code, error.message) == (Code.INVALID_ARG, reason)


def test_a_plan_for_a_dla_is_reported_if_the_config_names_none(
    backend: TensorRtBackend, folder: Path
) -> None:
    save(replace(NEGATE, for_dla=True), folder)
    assert "DLA core is not set" in completing(backend, folder).message


# Reasons not to load.


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            replace(NEGATE, version="10.3.0"),
            "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file "
            "is not compatible with this version of TensorRT, expecting library version 10.14.1 "
            "got 10.3.0, please rebuild.); build the plan on such a GPU with tensorrt 10.14.1, or "
            "as version-compatible",
        ),
        (
            replace(NEGATE, capability="8.6"),
            "The engine plan file is generated on an incompatible device, expecting compute 9.0 "
            "got compute 8.6, please rebuild.; build the plan on such a GPU with tensorrt "
            "10.14.1, or as version-compatible",
        ),
        (
            replace(NEGATE, plugins=("MyOp",)),
            "IPluginRegistry::getCreator: Error Code 4: API Usage Error (Cannot find plugin: "
            "MyOp, version: 1); name its library in --backend-config=tensorrt,plugins=a.so;b.so",
        ),
        (
            replace(NEGATE, version="10.3.0", version_compatible=True),
            "Cannot deserialize engine with lean runtime: engine host code is not allowed; allow "
            "it with --backend-config=tensorrt,version-compatible=true",
        ),
        (
            replace(NEGATE, weights=1 << 31),
            "Error Code 1: Cuda Runtime (out of memory); unload other models, or put this one on "
            "another GPU",
        ),
        (
            b"no plan at all",
            "Error Code 4: Magic; build the plan on such a GPU with tensorrt 10.14.1, or as "
            "version-compatible",
        ),
    ],
    ids=["version", "device", "plugin", "host code", "weights", "junk"],
)
def test_an_unreadable_plan_is_reported_with_its_remedy(
    backend: TensorRtBackend, folder: Path, plan: Any, reason: str
) -> None:
    save(plan, folder)
    error = completing(backend, folder)
    assert error.code is Code.INTERNAL
    assert error.message == f"{WHERE}unable to create TensorRT engine: {reason}"


async def test_version_compatible_plans_load_where_they_are_allowed(
    load: Load, backend: TensorRtBackend
) -> None:
    backend.settings = {"version-compatible": "true"}
    instance = await load(replace(NEGATE, version="10.3.0", version_compatible=True))
    assert await ask(instance, request(x=ONE)) == MINUS_ONE


async def test_a_load_out_of_memory_is_freed_and_other_models_are_served(
    load: Load, backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    instance = await load(NEGATE)
    kept = world.used(0)
    world.memory = kept + 100
    message = await refused(backend.load(context(M, folder, 1)), Code.INVALID_ARG)
    assert "configuration expects 0 inputs" in message
    whole = backend.complete(M, folder)
    message = await refused(backend.load(context(whole, folder, 1)), Code.UNAVAILABLE)
    assert message == (
        f"{WHERE}out of GPU memory (cudaMallocAsync: CUDA error 2, out of memory); unload other "
        "models, lower `count` of its instance_group, or put it on another GPU"
    )
    assert world.used(0) == kept
    assert world.counts["stream"] == 1
    world.memory = 1 << 30
    assert await ask(instance, request(x=ONE)) == MINUS_ONE


@pytest.mark.parametrize(
    "call",
    [
        "cudaGetDeviceCount",
        "cudaSetDevice",
        "cudaStreamCreateWithPriority",
        "cudaEventCreateWithFlags",
        "cudaEventSynchronize",
        "cudaMallocAsync",
    ],
)
async def test_a_load_that_cuda_refuses_frees_everything(
    backend: TensorRtBackend, folder: Path, world: Any, call: str
) -> None:
    save(NEGATE, folder)
    whole = backend.complete(M, folder)
    world.refuse(call, 719)
    message = await refused(backend.load(context(whole, folder)), Code.UNAVAILABLE)
    assert message.startswith("unable to load model 'm' on GPU 0")
    assert f"{call}: CUDA error 719, unspecified launch failure; see whether" in message


async def test_a_config_that_is_refused_last_frees_everything(
    backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    save(NEGATE, folder)
    whole = replace(backend.complete(M, folder), parameters={"padded_inputs": '{"x": 0}'})
    message = await refused(backend.load(context(whole, folder)), Code.INVALID_ARG)
    assert "expected 'x' to be an input whose first dim is -1" in message
    assert world.counts["stream"] == world.counts["pinned memory"] == 0


def test_a_failed_runtime_is_reported_with_its_reason(
    backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    save(NEGATE, folder)
    world.refuse("Runtime", 35)
    assert completing(backend, folder).message == (
        f"{WHERE}unable to create TensorRT runtime: CUDA initialization failure with error: 35"
    )


async def test_a_failed_context_is_reported_with_its_reason(
    backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    save(replace(NEGATE, extra={"no_context": True}), folder)
    whole = backend.complete(M, folder)
    message = await refused(backend.load(context(whole, folder)), Code.INTERNAL)
    assert message == (
        f"{WHERE}unable to create an execution context: create_execution_context: Error Code 2: "
        "OutOfMemory (no room)"
    )


def test_a_gpu_that_is_not_there_is_named(backend: TensorRtBackend, folder: Path) -> None:
    save(NEGATE, folder)
    error = completing(backend, folder, on(M, gpus=(3,)))
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        "unable to load model 'm': there is no GPU 3, CUDA finds 1; correct `gpus` of its "
        "instance_group, or CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.parametrize("kind", [InstanceKind.KIND_CPU, InstanceKind.KIND_MODEL])
async def test_only_gpus_execute_plans(
    backend: TensorRtBackend, folder: Path, kind: InstanceKind
) -> None:
    config = on(M, kind=kind, gpus=())
    message = await refused(backend.load(context(config, folder)), Code.INVALID_ARG)
    assert message == completing(backend, folder, config).message
    assert message.startswith(
        "unable to load model 'm', TensorRT backend supports only GPU device: instance group 'm' "
        f"has kind {kind}, expected KIND_GPU"
    )


def test_a_plan_that_is_missing_or_elsewhere_is_refused_as_by_triton(
    backend: TensorRtBackend, folder: Path
) -> None:
    error = completing(backend, folder)
    assert error.code is Code.UNAVAILABLE
    assert error.message == "unable to find '1/model.plan' for model instance 'm'"
    save(NEGATE, folder.parent, "outside.plan")
    error = completing(backend, folder, replace(M, default_model_filename="../outside.plan"))
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        "file '../outside.plan' of model 'm' is outside of the model's version folder"
    )


@pytest.mark.parametrize("name", ["2", "x", "-1", ""])
def test_a_profile_that_is_not_there_is_refused(
    backend: TensorRtBackend, folder: Path, name: str
) -> None:
    save(replace(NEGATE, profiles=(UP_TO_8, UP_TO_8)), folder)
    error = completing(backend, folder, on(M, profile=("0", name)))
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        f"instance_group of model 'm' specifies invalid profile '{name}'. Number of profiles "
        "supported by TensorRT engine: 2; expected one of '0', '1'"
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"type": "FP8"},
            "tensor 'x' of model 'm' has data type FP8 in its engine; build it with inputs and "
            "outputs of FLOAT, HALF, BF16, INT8, INT32, INT64, BOOL, UINT8",
        ),
        (
            {"format": "CHW4"},
            "tensor 'x' of model 'm' has format CHW4 in its engine; build it with inputs and "
            "outputs of the format LINEAR",
        ),
    ],
)
def test_tensors_that_the_protocol_has_not_are_refused(
    backend: TensorRtBackend, folder: Path, changed: dict[str, str], text: str
) -> None:
    save(replace(NEGATE, tensors=(replace(X, **changed), *NEGATE.tensors[1:])), folder)
    error = completing(backend, folder)
    assert (error.code, error.message) == (Code.UNSUPPORTED, text)


async def test_a_strategy_that_is_none_is_refused_in_tritons_words(load: Load) -> None:
    parameters = {"execution_context_allocation_strategy": "DYNAMIC"}
    message = await refused(load(NEGATE, replace(M, parameters=parameters)), Code.INVALID_ARG)
    assert message == (
        "Invalid value for 'execution_context_allocation_strategy': 'DYNAMIC' for model instance "
        "'m_0'"
    )


def test_a_setting_that_is_no_boolean_is_refused(backend: TensorRtBackend, folder: Path) -> None:
    save(NEGATE, folder)
    backend.settings = {"version-compatible": "perhaps"}
    assert completing(backend, folder).message == (
        "--backend-config=tensorrt,version-compatible: failed to convert 'perhaps' to boolean"
    )
