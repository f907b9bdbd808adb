"""Executions of ONNX models: datatypes, batches and failures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from backends.onnxruntime.backend import OnnxRuntimeBackend
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
from tests.backends.onnxruntime.conftest import x_and_y
from tests.builders import soon
from tests.onnx_models import add_sub, constant, identity, model, node, one, save, tensor
from tests.tensor_backends import Load, answers, ask, context, floats, request

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


async def test_bfloat16_mixes_with_other_datatypes(load: Load) -> None:
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
