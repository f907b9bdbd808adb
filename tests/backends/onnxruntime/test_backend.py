"""Loads of ONNX models, and their failures."""

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from backends.onnxruntime.backend import OnnxRuntimeBackend
from backends.onnxruntime.session import open_session
from gateway.backend_loader import BackendLoader
from gateway.config import (
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelOperations,
    ModelOutput,
)
from gateway.config.data_type import DataType
from gateway.config.optimization import (
    Accelerator,
    ExecutionAccelerators,
    GraphOptimization,
    OptimizationPolicy,
)
from gateway.errors import Code, InferenceError
from tests.builders import WAIT_SECS, soon
from tests.onnx_models import add_sub, constant, identity, model, node, one, save, tensor
from tests.serving import wait_until
from tests.tensor_backends import Load, ask, context, floats

X = ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(2,))
Y = ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(2,))
FIXED = ModelConfig(name="m", backend="onnxruntime", input=(X,), output=(Y,))
"""A config of y and x of two floats, without batches."""


def test_the_backend_is_found_by_its_name() -> None:
    assert isinstance(BackendLoader().get("onnxruntime"), OnnxRuntimeBackend)


def weighted() -> Any:
    """y = x + [10, 20]."""
    weights = constant("w", np.array([10, 20], dtype=np.float32))
    return model([node("Add", "x w", "y")], [tensor("x", [2])], [tensor("y", [2])], [weights])


def external(folder: Path) -> Path:
    """The weights are in a file of their own."""
    return save(
        weighted(), folder, save_as_external_data=True, location="weights.bin", size_threshold=0
    )


async def failure(folder: Path, config: ModelConfig = FIXED) -> InferenceError:
    """The reason why a model cannot be loaded; never with a path of the host or of C++ sources."""
    with pytest.raises(InferenceError) as caught:
        await soon(OnnxRuntimeBackend().load(context(config, folder)))
    message = caught.value.message
    assert str(folder.parents[1]) not in message
    assert not re.search(r"/onnxruntime_src|\.cc:\d|\.h:\d|\[ONNXRuntimeError\]|std::", message)
    assert "\n" not in message
    return caught.value


# What is loaded.


async def test_a_model_without_a_config_is_served(load: Load) -> None:
    instance = await load(add_sub())
    ones, twos = np.ones((1, 16)), np.full((1, 16), 2)
    (found,) = await ask(instance, floats(INPUT0=twos, INPUT1=ones))
    assert found == {"OUTPUT0": [[3] * 16], "OUTPUT1": [[1] * 16]}


async def test_weights_may_be_in_a_file_of_their_own(load: Load, folder: Path) -> None:
    external(folder)
    assert (folder / "weights.bin").is_file()
    (found,) = await ask(await load(None, FIXED), floats(x=[1, 2]))
    assert found == {"y": [11, 22]}


async def test_a_model_may_be_a_folder_with_its_weights(load: Load, folder: Path) -> None:
    external(folder / "model.onnx")
    (found,) = await ask(await load(None, FIXED), floats(x=[1, 2]))
    assert found == {"y": [11, 22]}


@pytest.mark.parametrize("level", [-1, 0, 1, 2])
async def test_every_level_of_optimization_gives_the_same(load: Load, level: int) -> None:
    policy = OptimizationPolicy(graph=GraphOptimization(level=level))
    instance = await load(weighted(), replace(FIXED, optimization=policy))
    assert await ask(instance, floats(x=[1, 2])) == [{"y": [11, 22]}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("execution_mode", "1"),
        ("execution_mode", "0"),
        ("enable_mem_arena", "0"),
        ("enable_mem_pattern", "false"),
        ("memory.enable_memory_arena_shrinkage", "cpu:0"),
        ("session.use_device_allocator_for_initializers", "1"),
        ("intra_op_thread_count", "2"),
        ("inter_op_thread_count", "2"),
        ("session.intra_op.allow_spinning", "true"),
    ],
)
async def test_every_option_of_a_session_is_taken(load: Load, key: str, value: str) -> None:
    instance = await load(weighted(), replace(FIXED, parameters={key: value}))
    assert await ask(instance, floats(x=[1, 2])) == [{"y": [11, 22]}]


async def test_a_session_has_the_options_of_its_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    opened = onnxruntime.InferenceSession

    def spy(file: str, options: Any, **rest: Any) -> Any:
        given.append(options)
        return opened(file, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    parameters = {
        "execution_mode": "1",
        "enable_mem_arena": "off",
        "enable_mem_pattern": "0",
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "2",
    }
    policy = OptimizationPolicy(graph=GraphOptimization(level=1))
    config = replace(FIXED, parameters=parameters, optimization=policy)
    instance = await soon(OnnxRuntimeBackend().load(context(config, save(weighted(), folder))))
    await soon(instance.close())
    (options,) = given
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert options.graph_optimization_level == (
        onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    )
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    for operators in ("intra", "inter"):
        key = f"session.{operators}_op.allow_spinning"
        assert options.get_session_config_entry(key) == "0"


# What is not.


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"execution_mode": "2"},
            "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 "
            "but got 2 .",
        ),
        (
            {"execution_mode": "fast"},
            "parameter 'execution_mode': failed to convert 'fast' to integral number",
        ),
        (
            {"enable_mem_arena": "maybe"},
            "parameter 'enable_mem_arena': failed to convert 'maybe' to boolean",
        ),
        (
            {"session.use_device_allocator_for_initializers": "2"},
            "parameter 'session.use_device_allocator_for_initializers': failed to convert '2' to "
            "boolean",
        ),
    ],
)
async def test_an_option_that_cannot_be_is_refused(
    folder: Path, parameters: dict[str, str], text: str
) -> None:
    error = await failure(save(weighted(), folder), replace(FIXED, parameters=parameters))
    assert (error.code, error.message) == (Code.INVALID_ARG, text)


async def test_an_unknown_level_of_optimization_is_refused(folder: Path) -> None:
    policy = OptimizationPolicy(graph=GraphOptimization(level=3))
    error = await failure(save(weighted(), folder), replace(FIXED, optimization=policy))
    assert error.code is Code.INVALID_ARG
    assert "is 3, expected -1 (basic), 0 (all), 1 (extended) or 2 (none)" in error.message


async def test_a_gpu_that_the_library_cannot_use_is_said_to_be_missing(folder: Path) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this library can use a GPU")
    group = InstanceGroup(name="m", kind=InstanceKind.KIND_GPU, count=1, gpus=(0,))
    save(weighted(), folder)
    with pytest.raises(InferenceError) as caught:
        await soon(OnnxRuntimeBackend().load(context(FIXED, folder, group)))
    assert caught.value.code is Code.UNSUPPORTED
    assert "instance 'm_0' needs CUDAExecutionProvider" in caught.value.message


async def test_an_accelerator_that_is_not_installed_is_said_to_be_missing(folder: Path) -> None:
    if "OpenVINOExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this library has OpenVINO")
    wanted = ExecutionAccelerators(cpu_execution_accelerator=(Accelerator(name="openvino"),))
    policy = OptimizationPolicy(execution_accelerators=wanted)
    error = await failure(save(weighted(), folder), replace(FIXED, optimization=policy))
    assert error.code is Code.UNSUPPORTED
    assert "needs OpenVINOExecutionProvider" in error.message


async def test_a_model_that_contradicts_its_config_is_refused(folder: Path) -> None:
    error = await failure(save(weighted(), folder), replace(FIXED, input=(replace(X, dims=(3,)),)))
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        "model 'm', tensor 'x': the model expects 1 dimensions (shape [2]) but the model "
        "configuration specifies 1 dimensions (shape [3])"
    )


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (
            lambda folder: (folder / "model.onnx").write_bytes(b"\x00junk\xff" * 999),
            "onnx runtime error 7: Load model from model.onnx failed:Protobuf parsing failed.",
        ),
        (
            lambda folder: (folder / "model.onnx").write_bytes(b""),
            "onnx runtime error 2: Load model from model.onnx failed:No graph was found",
        ),
        (
            lambda folder: (folder / "model.onnx").write_bytes(
                weighted().SerializeToString()[:-20]
            ),
            "onnx runtime error",
        ),
        (lambda folder: save(one("Frobnicate"), folder), "No Op registered for Frobnicate"),
        (
            lambda folder: save(one("Twist", domain="my.ops"), folder),
            "my.ops:Twist(-1) is not a registered function/op",
        ),
        (
            lambda folder: save(one("Identity", opset=99), folder),
            "Opset 99 is under development",
        ),
        (
            lambda folder: save(one("Identity", ir_version=99), folder),
            "Unsupported model IR version: 99",
        ),
        (
            lambda folder: (external(folder) / "weights.bin").unlink(),
            'External data path does not exist: "weights.bin"',
        ),
        (
            lambda folder: (external(folder) / "weights.bin").write_bytes(b"123"),
            "out of bounds or can not be read in full",
        ),
    ],
    ids=[
        "junk",
        "empty",
        "cut",
        "unknown operator",
        "unknown domain",
        "opset",
        "version",
        "no weights",
        "cut weights",
    ],
)
async def test_an_invalid_model_file_is_reported_with_its_reason(
    folder: Path, write: Callable[[Path], object], text: str
) -> None:
    write(folder)
    error = await failure(folder)
    assert error.code is Code.INTERNAL
    assert error.message.startswith("unable to load model 'm': onnx runtime error ")
    assert text in error.message
    with pytest.raises(InferenceError, match="unable to load model 'm': onnx runtime error"):
        OnnxRuntimeBackend().complete(ModelConfig(name="m"), folder)


async def test_weights_outside_of_the_models_folder_are_not_read(folder: Path) -> None:
    external(folder)
    (folder / "weights.bin").rename(folder.parent / "weights.bin")
    made = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    made.graph.initializer[0].external_data[0].value = "../weights.bin"
    (folder / "model.onnx").write_bytes(made.SerializeToString())
    assert 'resolved path: "weights.bin"' in (await failure(folder)).message


@pytest.mark.parametrize("place", ["m/1", "m"])
async def test_an_invalid_library_of_operations_is_reported(folder: Path, place: str) -> None:
    (folder.parents[1] / place / "ops.so").write_bytes(b"no library")
    operations = ModelOperations(op_library_filename=("ops.so",))
    error = await failure(save(weighted(), folder), replace(FIXED, model_operations=operations))
    assert error.code is Code.INTERNAL
    assert "Failed to load library ops.so" in error.message


async def test_a_file_that_is_not_there_is_unavailable(folder: Path) -> None:
    error = await failure(folder)
    assert error.code is Code.UNAVAILABLE
    assert error.message == "unable to find '1/model.onnx' for model instance 'm'"


async def test_two_instances_answer_side_by_side(load: Load) -> None:
    first = await load(identity(), FIXED_BATCHING)
    second = await load(None, FIXED_BATCHING)
    assert await ask(first, floats(x=[[1, 2]])) == await ask(second, floats(x=[[1, 2]]))


FIXED_BATCHING = replace(FIXED, max_batch_size=4)


def unpooled_threads() -> set[threading.Thread]:
    """All threads but those of asyncio's pool, which the test itself may add."""
    return {each for each in threading.enumerate() if not each.name.startswith("asyncio")}


async def test_a_load_that_is_cancelled_keeps_no_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that is being opened cannot be interrupted, and is released when it is open."""
    opening, gate = threading.Event(), threading.Event()

    def open_slowly(*plan: Any) -> Any:
        opening.set()
        gate.wait(WAIT_SECS)
        return open_session(*plan)

    save(add_sub((2,)), folder)
    backend = OnnxRuntimeBackend()
    config = backend.complete(replace(ModelConfig(), name="m"), folder)
    monkeypatch.setattr("backends.onnxruntime.backend.open_session", open_slowly)
    loading = asyncio.create_task(backend.load(context(config, folder)))
    assert await asyncio.to_thread(opening.wait, WAIT_SECS)
    before = {each for each in unpooled_threads() if not each.name.startswith("apart")}
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(loading)
    gate.set()
    await asyncio.to_thread(
        wait_until, lambda: unpooled_threads() <= before, "the instance is released"
    )
