"""Executions of plans: datatypes, batches, profiles, outputs of unknown size, and failures."""

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.tensorrt.backend import TensorRtBackend
from backends.tensorrt.cuda import CudaError
from gateway.config import BatchInput, BatchInputKind, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import SIZES, Datatype, Tensor
from tests.backends.tensorrt.conftest import (
    NEGATE,
    UP_TO_8,
    Load,
    M,
    X,
    Y,
    answers,
    ask,
    context,
    on,
    refused,
    request,
    save,
)
from tests.backends.tensorrt.stand_in.stand_in_plans import Plan, PlannedTensor
from tests.builders import death_of, soon

OUT_OF_MEMORY, LAUNCH_FAILURE, CAPTURE_UNSUPPORTED = 2, 719, 900
TYPES = {
    Datatype.FP32: "FLOAT",
    Datatype.FP16: "HALF",
    Datatype.BF16: "BF16",
    Datatype.INT8: "INT8",
    Datatype.INT32: "INT32",
    Datatype.INT64: "INT64",
    Datatype.BOOL: "BOOL",
    Datatype.UINT8: "UINT8",
}


def rows(*values: float) -> list[list[float]]:
    return [[value] * 4 for value in values]


@pytest.mark.parametrize("datatype", TYPES)
async def test_every_datatype_is_served(load: Load, datatype: Datatype) -> None:
    x = PlannedTensor(name="x", dims=(-1, 2), type=TYPES[datatype])
    y = replace(x, name="y", operation="identity", of=("x",))
    instance = await load(Plan(tensors=(x, y), profiles=({"x": ([1, 2], [1, 2], [4, 2])},)))
    wires = [bytes([0, 1] * SIZES[datatype]), bytes([1, 0] * SIZES[datatype])]
    sent = [InferRequest(model="m", inputs=(Tensor("x", datatype, (1, 2), w),)) for w in wires]
    found = [each for _, each in await answers(instance, *sent)]
    outputs = [each.outputs[0] for each in found if isinstance(each, InferResponse)]
    assert [bytes(each.raw()) for each in outputs] == wires
    assert {(each.name, each.datatype, each.shape) for each in outputs} == {("y", datatype, (1, 2))}


async def test_several_requests_are_one_execution(load: Load, world: Any) -> None:
    instance = await load(NEGATE)
    launched = world.calls["cudaEventSynchronize"]
    found = await ask(instance, request(x=rows(1, 2)), request(x=rows(3)))
    assert found == [{"y": rows(-1, -2)}, {"y": rows(-3)}]
    assert world.calls["cudaEventSynchronize"] == launched + 1


async def test_memory_is_kept_and_grows(load: Load, world: Any) -> None:
    wide = Plan(
        tensors=(replace(X, dims=(-1, -1)), replace(Y, dims=(-1, -1))),
        profiles=({"x": ([1, 1], [4, 4], [8, 4096])},),
    )
    instance = await load(wide)
    for width in (1000, 10, 1000):
        await ask(instance, request(x=np.ones((8, width), np.float32)))
    assert world.calls["cudaHostAlloc"] == 2
    await ask(instance, request(x=np.ones((8, 4096), np.float32)))
    assert world.calls["cudaHostAlloc"] == 4


async def test_an_output_outlives_later_executions(load: Load) -> None:
    instance = await load(NEGATE)
    ((_, first),) = await answers(instance, request(x=rows(1)))
    await ask(instance, request(x=rows(2)))
    assert isinstance(first, InferResponse)
    assert first.outputs[0].array().tolist() == rows(-1)


async def test_only_requested_outputs_are_fetched(load: Load, world: Any) -> None:
    z = replace(Y, name="z", operation="identity")
    instance = await load(Plan(tensors=(X, Y, z), profiles=(UP_TO_8,)))
    copied = world.calls["cudaMemcpyAsync"]
    assert await ask(instance, request(["z"], x=rows(5))) == [{"z": rows(5)}]
    assert world.calls["cudaMemcpyAsync"] == copied + 2


async def test_tensors_without_elements_go_through(load: Load) -> None:
    least_0 = {"x": ([0, 4], [4, 4], [8, 4])}
    instance = await load(replace(NEGATE, profiles=(least_0,)))
    assert await ask(instance, request(x=np.zeros((0, 4), np.float32))) == [{"y": []}]


async def test_scalars_have_a_dimension_for_clients(load: Load) -> None:
    plan = Plan(tensors=(replace(X, dims=()), replace(Y, dims=())))
    instance = await load(plan)
    assert await ask(instance, request(x=[3])) == [{"y": [-3]}]


async def test_a_batch_of_scalars_is_reshaped(load: Load) -> None:
    plan = Plan(
        tensors=(replace(X, dims=(-1,)), replace(Y, dims=(-1,))),
        profiles=({"x": ([1], [4], [8])},),
    )
    instance = await load(plan)
    assert await ask(instance, request(x=[[1], [2]]), request(x=[[3]])) == [
        {"y": [[-1], [-2]]},
        {"y": [[-3]]},
    ]


async def test_sizes_may_depend_on_values(load: Load) -> None:
    x = PlannedTensor(name="x", dims=(-1,))
    y = PlannedTensor(name="y", dims=(-1,), type="INT64", operation="nonzero", of=("x",))
    plan = Plan(tensors=(x, y), profiles=({"x": ([1], [4], [99])},))
    tensors = (ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(-1,)),)
    instance = await load(plan, replace(M, input=tensors))
    assert await ask(instance, request(x=[0, 1, 1, 0])) == [{"y": [1, 2]}]
    assert await ask(instance, request(x=[0] * 50 + [1] * 40)) == [{"y": [*range(50, 90)]}]
    assert await ask(instance, request(x=[0])) == [{"y": []}]


async def test_shape_tensors_are_values_on_the_host(load: Load) -> None:
    value = PlannedTensor(name="value", dims=())
    sizes = PlannedTensor(name="sizes", dims=(2,), type="INT64", host=True)
    filled = PlannedTensor(name="filled", dims=(-1, -1), operation="fill", of=("value", "sizes"))
    seen = PlannedTensor(name="seen", dims=(1,), type="INT64", operation="sizes", of=("x",))
    plan = Plan(tensors=(value, sizes, filled, replace(seen, of=("sizes",), host=True)))
    instance = await load(plan)
    asked = request(value=[7], sizes=np.array([1, 3], np.int64))
    assert await ask(instance, asked) == [{"filled": [[7, 7, 7]], "seen": [2]}]
    asked = request(value=[8], sizes=np.array([2, 1], np.int64))
    assert await ask(instance, asked) == [{"filled": [[8], [8]], "seen": [2]}]


async def test_ragged_inputs_are_one_flat_tensor(load: Load) -> None:
    x = PlannedTensor(name="x", dims=(-1,))
    ends = PlannedTensor(name="ends", dims=(-1,), type="INT32")
    y = replace(ends, name="y", operation="identity", of=("ends",))
    plan = Plan(tensors=(x, ends, y), profiles=({"x": ([1], [8], [64]), "ends": ([1], [2], [8])},))
    ragged = ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(-1,), allow_ragged_batch=True)
    flat = ModelOutput(name="y", data_type=DataType.TYPE_INT32, dims=(1,), reshape=TensorReshape())
    counted = BatchInput(
        kind=BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT,
        target_name=("ends",),
        data_type=DataType.TYPE_INT32,
        source_input=("x",),
    )
    config = replace(M, max_batch_size=8, input=(ragged,), output=(flat,), batch_input=(counted,))
    instance = await load(plan, config)
    found = await ask(instance, request(x=[[1, 2, 3]]), request(x=[[4, 5]]))
    assert found == [{"y": [[3]]}, {"y": [[5]]}]


# Profiles.


TWO_PROFILES = replace(
    NEGATE,
    profiles=(UP_TO_8, {"x": ([1, 4], [32, 4], [64, 4])}),
    scratch=(512, 4096),
)


async def test_the_nearest_profile_serves(load: Load, world: Any) -> None:
    config = on(M, profile=("0", "1"))
    instance = await load(TWO_PROFILES, config)
    assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]
    many = rows(*range(40))
    assert (await ask(instance, request(x=many)))[0]["y"][39] == [-39] * 4
    assert world.counts["context"] == 2


async def test_shapes_outside_of_every_profile_are_refused_with_the_ranges(
    load: Load,
) -> None:
    least_2 = {"x": ([2, 4], [4, 4], [8, 4])}
    instance = await load(replace(NEGATE, profiles=(least_2,)))
    message = await refused(ask(instance, request(x=rows(1))), Code.INVALID_ARG)
    assert message == (
        "model 'm' on GPU 0 (Stand-in, compute capability 9.0): 'x' has shape [1,4], which no "
        "optimization profile of the instance allows: profile 0 takes 'x' from [2,4] to [8,4]; "
        "send such shapes, or name another profile in instance_group"
    )
    assert await ask(instance, request(x=rows(1, 2))) == [{"y": rows(-1, -2)}]


# Failures.


async def test_out_of_memory_fails_one_execution_only(load: Load, world: Any) -> None:
    instance = await load(NEGATE)
    world.refuse("cudaMallocAsync", OUT_OF_MEMORY)
    message = await refused(ask(instance, request(x=rows(1))), Code.UNAVAILABLE)
    assert message == (
        "model 'm' is out of memory on GPU 0 (Stand-in, compute capability 9.0) (cudaMallocAsync: "
        "CUDA error 2, out of memory); send smaller requests, try again later, or unload other "
        "models"
    )
    assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]


async def test_a_batch_that_is_too_large_for_the_memory_is_halved(load: Load, world: Any) -> None:
    wide = Plan(
        tensors=(replace(X, dims=(-1, 4096)), replace(Y, dims=(-1, 4096))),
        profiles=({"x": ([1, 4096], [4, 4096], [8, 4096])},),
    )
    world.memory = 1000 + 512 + 2 * 70_000
    instance = await load(wide)
    one = request(x=np.ones((2, 4096), np.float32))
    found = await ask(instance, one, one, one, one)
    assert [len(each["y"]) for each in found] == [2] * 4


async def test_out_of_memory_for_an_output_of_unknown_size_is_reported(
    load: Load, world: Any
) -> None:
    x = PlannedTensor(name="x", dims=(-1,))
    y = PlannedTensor(name="y", dims=(-1,), type="INT64", operation="nonzero", of=("x",))
    plan = Plan(tensors=(x, y), profiles=({"x": ([1], [4], [9999])},))
    tensors = (ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(-1,)),)
    instance = await load(plan, replace(M, input=tensors))
    world.memory = world.used(0) + 65_536
    message = await refused(ask(instance, request(x=[1.0] * 9999)), Code.UNAVAILABLE)
    assert message.startswith("model 'm' is out of memory on GPU 0")
    assert await ask(instance, request(x=[0, 1])) == [{"y": [1]}]


async def test_refusals_of_tensorrt_are_reported_without_paths_and_places(
    backend: TensorRtBackend, folder: Path
) -> None:
    save(replace(NEGATE, extra={"fails": True}), folder)
    instance = await soon(backend.load(context(backend.complete(M, folder), folder)))
    message = await refused(ask(instance, request(x=rows(1))), Code.INTERNAL)
    assert message == (
        "model 'm' failed on GPU 0 (Stand-in, compute capability 9.0): TensorRT: execution: Error "
        "Code 1: cask (no kernel)"
    )
    await soon(instance.close())


async def test_an_instance_dies_with_its_gpu(
    backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    save(NEGATE, folder)
    instance = await soon(backend.load(context(backend.complete(M, folder), folder)))
    death = asyncio.create_task(death_of(instance))
    world.lose(0)
    with pytest.raises(InferenceError) as caught:
        await soon(ask(instance, request(x=rows(1))))
    assert (caught.value.code, caught.value.dead_instance) == (Code.UNAVAILABLE, 0)
    message = caught.value.message
    assert message == (
        "GPU 0 (Stand-in, compute capability 9.0) of model 'm' is gone for this process: "
        "cudaEventRecord: CUDA error 719, unspecified launch failure; see whether nvidia-smi shows "
        "it, and restart the server"
    )
    assert await soon(death) == message
    await soon(instance.close())
    message = await refused(backend.load(context(M, folder)), Code.UNAVAILABLE)
    assert message.startswith("unable to load model 'm' on GPU 0: cudaGetDeviceCount: CUDA error")
    world.counts.clear()  # what was on the GPU is gone


async def test_a_failure_that_passes_is_no_death(load: Load, world: Any) -> None:
    instance = await load(NEGATE)
    world.refuse("cudaEventRecord", LAUNCH_FAILURE)
    message = await refused(ask(instance, request(x=rows(1))), Code.INTERNAL)
    assert "cudaEventRecord: CUDA error 719" in message
    assert await ask(instance, request(x=rows(2))) == [{"y": rows(-2)}]


async def test_an_instance_that_dies_on_a_working_gpu_frees_its_memory(
    backend: TensorRtBackend, folder: Path, world: Any
) -> None:
    save(NEGATE, folder)
    instance = await soon(backend.load(context(backend.complete(M, folder), folder)))
    assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]
    world.lose(0)
    message = await refused(ask(instance, request(x=rows(1))), Code.UNAVAILABLE)
    assert await soon(death_of(instance)) == message
    world.recover(0)
    await soon(instance.close())
    del instance
    gc.collect()
    assert world.leaks == {}


@pytest.mark.parametrize("call", ["cudaEventSynchronize", "cudaStreamSynchronize"])
async def test_closing_frees_everything_even_if_a_wait_fails(
    backend: TensorRtBackend, folder: Path, world: Any, call: str
) -> None:
    save(NEGATE, folder)
    instance = await soon(backend.load(context(backend.complete(M, folder), folder)))
    assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]
    world.refuse(call, LAUNCH_FAILURE)
    with pytest.raises(CudaError, match=call):
        await soon(instance.close())


async def test_an_instance_dies_only_by_permanent_errors_of_its_gpu(load: Load, world: Any) -> None:
    instance = await load(NEGATE)
    for status in (OUT_OF_MEMORY, CAPTURE_UNSUPPORTED):
        world.refuse("cudaMallocAsync", status)
        world.refuse("cudaEventRecord", CAPTURE_UNSUPPORTED)
    message = await refused(ask(instance, request(x=rows(1))), Code.UNAVAILABLE)
    assert message.startswith("model 'm' is out of memory on GPU 0")
    message = await refused(ask(instance, request(x=rows(1))), Code.INTERNAL)
    assert "cudaMallocAsync: CUDA error 900" in message
    assert await ask(instance, request(x=rows(2))) == [{"y": rows(-2)}]
