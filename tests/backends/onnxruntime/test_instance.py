"""Executions of ONNX models: datatypes, batches and failures."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from backends.onnxruntime.backend import OnnxRuntimeBackend
from backends.onnxruntime.instance import OnnxRuntimeInstance
from backends.onnxruntime.session import SessionPlan, open_session
from backends.onnxruntime.threads import SessionThreads
from gateway.config import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ModelConfig,
    ModelInput,
    ModelOutput,
    TensorReshape,
)
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import SIZES, Datatype, Tensor
from tests.backends.onnxruntime.conftest import (
    Load,
    answers,
    ask,
    context,
    floats,
    request,
)
from tests.builders import soon
from tests.onnx_models import add_sub, constant, identity, model, node, one, save, tensor

ELEMENTS = {
    Datatype.BOOL: TensorProto.BOOL,
    Datatype.UINT8: TensorProto.UINT8,
    Datatype.UINT16: TensorProto.UINT16,
    Datatype.UINT32: TensorProto.UINT32,
    Datatype.UINT64: TensorProto.UINT64,
    Datatype.INT8: TensorProto.INT8,
    Datatype.INT16: TensorProto.INT16,
    Datatype.INT32: TensorProto.INT32,
    Datatype.INT64: TensorProto.INT64,
    Datatype.FP16: TensorProto.FLOAT16,
    Datatype.FP32: TensorProto.FLOAT,
    Datatype.FP64: TensorProto.DOUBLE,
    Datatype.BF16: TensorProto.BFLOAT16,
}


def x_and_y(dims: tuple[int, ...] = (-1,), **fields: Any) -> ModelConfig:
    """A batching config of input x and output y."""
    return ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=dims),),
        output=(ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=dims),),
        **fields,
    )


# Datatypes.


@pytest.mark.parametrize("datatype", ELEMENTS)
async def test_every_numeric_datatype_is_served(load: Load, datatype: Datatype) -> None:
    instance = await load(identity(ELEMENTS[datatype]))
    wires = [bytes([0, 1] * SIZES[datatype]), bytes([1, 0] * SIZES[datatype])]
    if datatype is Datatype.BOOL:
        wires = [b"\x00\x01", b"\x01\x00"]
    requests = [
        InferRequest(model="m", inputs=(Tensor("x", datatype, (1, 2), wire),)) for wire in wires
    ]
    for several in (requests[:1], requests):
        found = [each for _, each in await answers(instance, *several)]
        outputs = [each.outputs[0] for each in found if isinstance(each, InferResponse)]
        assert [bytes(each.raw()) for each in outputs] == wires[: len(several)]
        assert {(each.name, each.datatype, each.shape) for each in outputs} == {
            ("y", datatype, (1, 2))
        }


async def test_strings_go_in_and_out(load: Load) -> None:
    instance = await load(identity(TensorProto.STRING))
    words = [[b"a\0b", "\u20ac".encode()], [b"", b"long " * 99]]
    found = await ask(instance, request({"x": words}, Datatype.BYTES))
    assert found == [{"y": words}]
    wire = Tensor("x", Datatype.BYTES, (1, 1), b"\x02\x00\x00\x00hi")
    assert await ask(instance, InferRequest(model="m", inputs=(wire,))) == [{"y": [[b"hi"]]}]


async def test_a_string_that_is_not_utf_8_fails_alone(load: Load) -> None:
    instance = await load(identity(TensorProto.STRING))
    good, bad = (request({"x": [[word]]}, Datatype.BYTES) for word in (b"good", b"b\xffd"))
    found = dict(await answers(instance, good, bad, good))
    error = found[1]
    assert isinstance(error, InferenceError)
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        "input 'x' of model 'm' has an element that is not UTF-8 (invalid start byte at byte 1), "
        "which strings of ONNX models are"
    )
    assert isinstance(found[0], InferResponse)
    assert isinstance(found[2], InferResponse)


async def test_bfloat16_may_stand_beside_other_datatypes(load: Load) -> None:
    made = model(
        [node("Cast", "x", "y", to=TensorProto.FLOAT), node("Cast", "w", "z", to=16)],
        [tensor("x", ["b", 2], TensorProto.BFLOAT16), tensor("w", ["b", 2])],
        [tensor("y", ["b", 2]), tensor("z", ["b", 2], TensorProto.BFLOAT16)],
    )
    instance = await load(made)
    bits = np.array([[0x3F80, 0xC000]], dtype=np.uint16)
    both = InferRequest(
        model="m",
        inputs=(
            request({"x": bits}, Datatype.BF16).inputs[0],
            floats(w=[[1, -2]]).inputs[0],
        ),
    )
    (found,) = await ask(instance, both)
    assert found == {"y": [[1, -2]], "z": [[0x3F80, 0xC000]]}


async def test_an_output_outlives_its_run_and_its_instance(folder: Path) -> None:
    for element, datatype in (
        (TensorProto.FLOAT, Datatype.FP32),
        (TensorProto.BFLOAT16, Datatype.BF16),
    ):
        save(identity(element), folder)
        runtime = OnnxRuntimeBackend()
        config = runtime.complete(ModelConfig(name="m"), folder)
        instance = await soon(runtime.load(context(config, folder)))
        wire = bytes(range(200)) * SIZES[datatype]
        sent = InferRequest(model="m", inputs=(Tensor("x", datatype, (1, 200), wire),))
        ((_, response),) = await answers(instance, sent)
        await soon(instance.close())
        assert isinstance(response, InferResponse)
        assert bytes(response.outputs[0].raw()) == wire


async def test_a_tensor_may_begin_anywhere_in_the_body_of_its_request(load: Load) -> None:
    instance = await load(one("Neg", ("b", 4)))
    body = b"?" + np.array([1, 2, 3, 4], dtype=np.float32).tobytes()
    sent = Tensor("x", Datatype.FP32, (1, 4), memoryview(body)[1:])
    assert await ask(instance, InferRequest(model="m", inputs=(sent,))) == [
        {"y": [[-1, -2, -3, -4]]}
    ]


async def test_other_values_are_passed_through(load: Load) -> None:
    instance = await load(identity())
    ((_, response),) = await answers(instance, floats(x=[[np.nan, np.inf, -np.inf]]))
    assert isinstance(response, InferResponse)
    np.testing.assert_array_equal(response.outputs[0].array(), [[np.nan, np.inf, -np.inf]])


async def test_a_batch_of_nothing_is_answered_with_nothing(load: Load) -> None:
    instance = await load(identity())
    assert await ask(instance, floats(x=np.zeros((0, 3)))) == [{"y": []}]
    assert await ask(instance, floats(x=np.zeros((2, 0)))) == [{"y": [[], []]}]


# Batches.


async def test_several_requests_are_one_run(load: Load) -> None:
    instance = await load(add_sub())
    requests = [
        floats(INPUT0=np.full((rows, 16), rows), INPUT1=np.ones((rows, 16))) for rows in (1, 2)
    ]
    first, second = await ask(instance, *requests)
    assert first == {"OUTPUT0": [[2] * 16], "OUTPUT1": [[0] * 16]}
    assert second == {"OUTPUT0": [[3] * 16] * 2, "OUTPUT1": [[1] * 16] * 2}


async def test_only_requested_outputs_are_computed(load: Load) -> None:
    instance = await load(add_sub())
    values = {"INPUT0": np.ones((1, 16), np.float32), "INPUT1": np.ones((1, 16), np.float32)}
    (found,) = await ask(instance, request(values, outputs=["OUTPUT1"]))
    assert found == {"OUTPUT1": [[0] * 16]}


async def test_a_batch_of_scalars_looks_like_a_batch_of_ones(load: Load) -> None:
    instance = await load(one("Neg", ("b",)))
    found = await ask(instance, floats(x=[[1], [2]]), floats(x=[[3]]))
    assert found == [{"y": [[-1], [-2]]}, {"y": [[-3]]}]


async def test_reshape_is_undone_for_the_client(load: Load) -> None:
    config = x_and_y((4,))
    shaped = replace(
        config,
        input=(replace(config.input[0], reshape=TensorReshape(shape=(2, 2))),),
        output=(replace(config.output[0], reshape=TensorReshape(shape=(2, 2))),),
    )
    made = model(
        [node("Transpose", "x", "y", perm=[0, 2, 1])],
        [tensor("x", ["b", 2, 2])],
        [tensor("y", ["b", 2, 2])],
    )
    instance = await load(made, shaped)
    assert await ask(instance, floats(x=[[1, 2, 3, 4]])) == [{"y": [[1, 3, 2, 4]]}]


async def test_a_ragged_batch_is_summed_by_its_bounds(load: Load) -> None:
    told = BatchInput(
        kind=BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT,
        target_name=("ends",),
        data_type=DataType.TYPE_INT32,
        source_input=("x",),
    )
    config = x_and_y(batch_input=(told,))
    ragged = replace(config.input[0], allow_ragged_batch=True)
    sums = replace(config.output[0], dims=(1,))
    one_axis = constant("axis", np.array([1], dtype=np.int64))
    last = constant("one", np.array([1], dtype=np.int32))
    zero = constant("zero", np.array(0, dtype=np.int64))
    made = model(
        [
            node("CumSum", "x zero", "sums"),
            node("Sub", "ends one", "lasts"),
            node("Gather", "sums lasts", "flat"),
            node("Unsqueeze", "flat axis", "y"),
        ],
        [tensor("x", ["n"]), tensor("ends", ["r"], TensorProto.INT32)],
        [tensor("y", ["r", 1])],
        [one_axis, last, zero],
    )
    instance = await load(made, replace(config, input=(ragged,), output=(sums,)))
    found = await ask(instance, floats(x=[[1, 2, 3]]), floats(x=[[4, 5]]))
    assert found == [{"y": [[6]]}, {"y": [[15]]}]


async def test_a_flat_output_is_cut_up_by_the_shapes_of_the_requests(load: Load) -> None:
    config = x_and_y(batch_output=(BatchOutput(target_name=("y",), source_input=("x",)),))
    ragged = replace(config.input[0], allow_ragged_batch=True)
    instance = await load(one("Neg", ("n",)), replace(config, input=(ragged,)))
    found = await ask(instance, floats(x=[[1, 2, 3]]), floats(x=[[4], [5]]))
    assert found == [{"y": [[-1, -2, -3]]}, {"y": [[-4], [-5]]}]


async def test_padded_sequences_have_the_results_of_single_ones(load: Load) -> None:
    instance = await load(*masked_mean())
    rng = np.random.default_rng(5)
    requests = []
    for rows, length in ((1, 3), (2, 9), (1, 1), (3, 7)):
        tokens = rng.normal(size=(rows, length)).astype(np.float32)
        requests.append(floats(x=tokens, mask=np.ones_like(tokens)))
    together = await ask(instance, *requests)
    alone = [(await ask(instance, each))[0] for each in requests]
    for one_of_many, single in zip(together, alone, strict=True):
        for name in ("tokens", "mean"):
            np.testing.assert_allclose(one_of_many[name], single[name], atol=1e-5)


def masked_mean() -> tuple[Any, ModelConfig]:
    """A sequence tokens, shifted by its masked mean, and that mean."""
    made = model(
        [
            node("Mul", "x mask", "kept"),
            node("ReduceSum", "kept axis", "sum", keepdims=1),
            node("ReduceSum", "mask axis", "count", keepdims=1),
            node("Div", "sum count", "mean"),
            node("Sub", "x mean", "tokens"),
        ],
        [tensor("x", ["b", "s"]), tensor("mask", ["b", "s"])],
        [tensor("tokens", ["b", "s"]), tensor("mean", ["b", 1])],
        [constant("axis", np.array([1], dtype=np.int64))],
    )
    sizes = {"x": (-1,), "mask": (-1,), "tokens": (-1,), "mean": (1,)}
    config = ModelConfig(
        name="m",
        max_batch_size=16,
        input=tuple(
            ModelInput(name=name, data_type=DataType.TYPE_FP32, dims=sizes[name])
            for name in ("x", "mask")
        ),
        output=tuple(
            ModelOutput(name=name, data_type=DataType.TYPE_FP32, dims=sizes[name])
            for name in ("tokens", "mean")
        ),
        parameters={"padded_inputs": '{"x": 9999, "mask": 0}'},
    )
    return made, config


async def test_an_initializer_is_used_unless_the_request_has_it(load: Load) -> None:
    weights = constant("w", np.array([10], dtype=np.float32))
    made = model(
        [node("Mul", "x w", "y")],
        [tensor("x", [1]), tensor("w", [1])],
        [tensor("y", [1])],
        [weights],
    )
    config = replace(x_and_y((1,)), max_batch_size=0)
    optional = replace(config.input[0], name="w", optional=True)
    instance = await load(made, replace(config, input=(*config.input, optional)))
    assert await ask(instance, floats(x=[2])) == [{"y": [20]}]
    assert await ask(instance, floats(x=[2], w=[3])) == [{"y": [6]}]


# Failures.


async def test_an_operator_that_fails_fails_the_request_and_no_later_one(load: Load) -> None:
    made = model(
        [node("Add", "x z", "y", name="/layer/Add")],
        [tensor("x", ["b", "s"]), tensor("z", ["b", "t"])],
        [tensor("y", ["b", "u"])],
    )
    instance = await load(made)
    with pytest.raises(InferenceError) as caught:
        await answers(instance, floats(x=np.ones((1, 2)), z=np.ones((1, 3))))
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == (
        "model 'm' failed: onnx runtime error 1: Non-zero status code returned while running Add "
        "node. Name:'/layer/Add' Status Message: axis == 1 || axis == largest was false. "
        "Attempting to broadcast an axis by a dimension other than 1. 2 by 3"
    )
    assert await ask(instance, floats(x=[[1]], z=[[2]])) == [{"y": [[3]]}]


async def test_an_index_out_of_bounds_fails_its_request_and_not_its_batch(load: Load) -> None:
    made = model(
        [node("Gather", "table x", "y")],
        [tensor("x", ["b", "s"], TensorProto.INT64)],
        [tensor("y", ["b", "s"])],
        [constant("table", np.array([10, 20], dtype=np.float32))],
    )
    instance = await load(made)
    requests = [request({"x": [[index]]}, Datatype.INT64) for index in (1, 10**9, 0)]
    first, bad, last = [response for _, response in await answers(instance, *requests)]
    for response, expected in ((first, 20), (last, 10)):
        assert isinstance(response, InferResponse)
        assert response.outputs[0].array().tolist() == [[expected]]
    assert isinstance(bad, InferenceError)
    assert "indices element out of data bounds, idx=1000000000" in bad.message


async def test_nonzero_booleans_are_true_and_count_once(load: Load) -> None:
    made = model(
        [node("Compress", "x c", "y", axis=0)],
        [tensor("x", [4]), tensor("c", [4], TensorProto.BOOL)],
        [tensor("y", ["n"])],
    )
    condition = Tensor("c", Datatype.BOOL, (4,), b"\xff\x00\x02\x01")
    inputs = (*floats(x=[1, 2, 3, 4]).inputs, condition)
    assert await ask(await load(made), InferRequest(model="m", inputs=inputs)) == [{"y": [1, 3, 4]}]


async def test_a_shape_that_the_model_refuses_is_reported(load: Load) -> None:
    instance = await load(one("Neg", ("b", 4)), x_and_y())
    with pytest.raises(InferenceError) as caught:
        await answers(instance, floats(x=[[1, 2]]))
    assert caught.value.code is Code.INTERNAL
    assert "onnx runtime error 2: Got invalid dimensions for input: x" in caught.value.message
    assert "index: 1 Got: 2 Expected: 4" in caught.value.message


async def test_an_output_that_contradicts_the_config_is_reported(load: Load) -> None:
    made = model(
        [node("Concat", "x x", "y", axis=1)],
        [tensor("x", ["b", "s"])],
        [tensor("y", ["b", "t"])],
    )
    config = x_and_y((2,))
    instance = await load(made, config)
    with pytest.raises(InferenceError, match=r"shape \[1,4\], expected shape \[1,2\]"):
        await answers(instance, floats(x=[[1, 2]]))


async def test_an_optional_input_that_the_model_needs_is_missed_by_name(load: Load) -> None:
    config = replace(x_and_y((1,)), max_batch_size=0)
    made = model([node("Neg", "x", "y")], [tensor("x", [1])], [tensor("y", [1])])
    instance = await load(made, replace(config, input=(replace(config.input[0], optional=True),)))
    with pytest.raises(InferenceError) as caught:
        await answers(instance, InferRequest(model="m"))
    assert "Required inputs (['x']) are missing" in caught.value.message


# Leaving, and waiting for a turn.


def endless() -> Any:
    """A model that computes for a minute or so, in one operator after the other."""
    nodes = [node("MatMul", f"t{n} x", f"t{n + 1}") for n in range(2000)]
    return model(
        [node("Identity", "x", "t0"), *nodes, node("Identity", "t2000", "y")],
        [tensor("x", ["s", "s"])],
        [tensor("y", ["s", "s"])],
    )


async def test_a_run_without_waiting_clients_is_terminated(load: Load) -> None:
    config = replace(x_and_y((-1, -1)), max_batch_size=0)
    instance = await load(endless(), config)
    big = floats(x=np.zeros((600, 600)))
    task = asyncio.create_task(answers(instance, big))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0.3)
    assert await ask(instance, floats(x=[[0]])) == [{"y": [[0]]}]


async def test_sessions_of_a_shared_pool_run_in_turn(folder: Path) -> None:
    config = OnnxRuntimeBackend().complete(ModelConfig(name="m"), save(add_sub(), folder))
    plan = SessionPlan("m_0", SessionThreads(1, 1), [("CPUExecutionProvider", {})])
    turns = threading.Semaphore(1)
    instances = [
        OnnxRuntimeInstance(context(config, folder), open_session(config, folder, plan), turns)
        for _ in range(3)
    ]
    turns.acquire()
    ones = floats(INPUT0=np.ones((1, 16)), INPUT1=np.ones((1, 16)))
    waiting = [asyncio.create_task(answers(each, ones)) for each in instances]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert done == set()
    turns.release()
    assert len(await soon(asyncio.gather(*waiting))) == 3
    for each in instances:
        await soon(each.close())
