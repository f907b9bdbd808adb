"""Runs of OpenVINO models: batches, datatypes, cancellation."""

import asyncio
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as op
import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, Tensor
from tests.backends.openvino.conftest import bounded, called, pairs, port, reshaped, sums, unchanged
from tests.builders import soon
from tests.tensor_backends import Load, answers, ask, floats, request

ONE_TYPE = [
    (np.bool_, Datatype.BOOL, [[True, False]]),
    (np.uint8, Datatype.UINT8, [[0, 255]]),
    (np.uint16, Datatype.UINT16, [[0, 2**16 - 1]]),
    (np.uint32, Datatype.UINT32, [[0, 2**32 - 1]]),
    (np.uint64, Datatype.UINT64, [[0, 2**63]]),
    (np.int8, Datatype.INT8, [[-128, 127]]),
    (np.int16, Datatype.INT16, [[-(2**15), 1]]),
    (np.int32, Datatype.INT32, [[-(2**31), 1]]),
    (np.int64, Datatype.INT64, [[-(2**63), 1]]),
    (np.float16, Datatype.FP16, [[0.5, -2.0]]),
    (np.float32, Datatype.FP32, [[0.5, -2.0]]),
    (np.float64, Datatype.FP64, [[0.1, -2.0]]),
]


@pytest.mark.parametrize(("element", "datatype", "values"), ONE_TYPE)
async def test_numbers_of_every_datatype_are_passed_on(
    load: Load, element: Any, datatype: Datatype, values: list[list[Any]]
) -> None:
    instance = await load(unchanged(element))
    assert await ask(instance, request({"x": np.array(values, element)}, datatype)) == [
        {"x": values}
    ]


async def test_bfloat16_is_passed_on_bit_by_bit(load: Load) -> None:
    bits = np.array([[0x3F80, 0xC020]], np.uint16)
    tensor = Tensor("x", Datatype.BF16, (1, 2), bits.tobytes())
    instance = await load(unchanged(openvino.Type.bf16))
    ((_, response),) = await answers(instance, InferRequest(model="m", inputs=(tensor,)))
    assert isinstance(response, InferResponse), response
    assert bytes(response.outputs[0].raw()) == bits.tobytes()


async def test_strings_are_texts(load: Load) -> None:
    instance = await load(unchanged(openvino.Type.string))
    sent = request({"x": [["a", "äö"], ["", "c d"]]}, Datatype.BYTES)
    (found,) = await ask(instance, sent)
    assert found == {"x": [[b"a", "äö".encode()], [b"", b"c d"]]}


@pytest.mark.parametrize(
    ("element", "why"),
    [(b"\xff", "is not UTF-8"), (b"a\0", "ends with a zero byte")],
)
async def test_strings_that_the_library_would_change_are_refused(
    load: Load, element: bytes, why: str
) -> None:
    instance = await load(unchanged(openvino.Type.string))
    bad = Tensor("x", Datatype.BYTES, (1, 2), (b"a", element))
    good = request({"x": [["a", "b"]]}, Datatype.BYTES)
    found = dict(await answers(instance, InferRequest(model="m", inputs=(bad,)), good))
    error = found[0]
    assert isinstance(error, InferenceError)
    assert (error.code, why in error.message) == (Code.INVALID_ARG, True)
    assert isinstance(found[1], InferResponse)


@pytest.mark.parametrize("rows", [1, 3, 4])
async def test_a_batch_has_any_number_of_rows(load: Load, rows: int) -> None:
    """Triton accepts exactly `max_batch_size` rows."""
    instance = await load(sums([4, 2]), batched(sums_config(), 4))
    each = [[1.0, 2.0]] * rows
    assert await ask(instance, floats(A=each, B=each)) == [
        {"SUM": [[2, 4]] * rows, "DIFFERENCE": [[0, 0]] * rows}
    ]


PAIRS = ModelConfig(
    max_batch_size=8,
    input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(6,)),),
    output=(ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(3, 2)),),
)


async def test_requests_of_one_batch_get_their_own_rows(load: Load) -> None:
    instance = await load(sums([-1, 1]), batched(sums_config(1), 8))
    asked = [floats(A=[[n]] * n, B=[[1]] * n) for n in (1, 2, 3)]
    assert [each["SUM"] for each in await ask(instance, *asked)] == [
        [[n + 1]] * n for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5])
async def test_a_batch_of_a_model_that_fixes_its_rows_is_padded_or_divided(
    load: Load, rows: int
) -> None:
    instance = await load(pairs(2), PAIRS)
    for _ in range(2):  # a full batch after a short one loses no row
        sent = np.arange(6 * rows).reshape(rows, 6)
        assert await ask(instance, floats(x=sent)) == [{"y": sent.reshape(rows, 3, 2).tolist()}]


async def test_a_model_whose_outputs_have_other_rows_than_its_inputs_has_no_batches(
    load: Load,
) -> None:
    """Of an output of four rows for one row, each request would get a row of the first."""
    with pytest.raises(InferenceError) as caught:
        await load(
            reshaped([1, 6], [3, 2]), replace(PAIRS, output=(replace(PAIRS.output[0], dims=(2,)),))
        )
    assert caught.value.code is Code.INVALID_ARG
    assert "the first dimension must be -1; but shape expected by the model is [1,6]" in (
        caught.value.message
    )


async def test_outputs_that_the_config_omits_may_have_other_rows(load: Load) -> None:
    instance = await load(reshaped([2, 6], [2, 3, 2], [12]), PAIRS)
    sent = np.arange(18).reshape(3, 6)
    assert await ask(instance, floats(x=sent)) == [{"y": sent.reshape(3, 3, 2).tolist()}]


async def test_responses_stay_as_they_are_during_later_runs(load: Load) -> None:
    instance = await load(sums([-1, 1]))
    ((_, first),) = await answers(instance, floats(A=[[1]], B=[[1]]))
    await answers(instance, floats(A=[[5]], B=[[5]]))
    assert isinstance(first, InferResponse)
    assert first.outputs[0].array().tolist() == [[2]]


@pytest.mark.parametrize("offset", [0, 1])
async def test_inputs_in_the_body_of_a_request_are_accepted(load: Load, offset: int) -> None:
    """They cannot be written, and begin at any offset."""
    body = bytes(offset) + np.array([[1, 2]], np.float32).tobytes()
    tensor = Tensor("x", Datatype.FP32, (1, 2), memoryview(body)[offset:])
    instance = await load(unchanged(np.float32))
    assert await ask(instance, InferRequest(model="m", inputs=(tensor,))) == [{"x": [[1, 2]]}]


async def test_a_shape_that_the_model_does_not_take_fails_alone(load: Load) -> None:
    instance = await load(sums([-1, -1]))
    with pytest.raises(InferenceError) as caught:
        await answers(instance, floats(A=[[1, 2]], B=[[1, 2, 3]]))
    assert caught.value.message.startswith("model 'm' failed: openvino error in ")
    assert "src/" not in caught.value.message
    assert await ask(instance, floats(A=[[1]], B=[[1]])) == [{"SUM": [[2]], "DIFFERENCE": [[0]]}]


@pytest.mark.parametrize("rows", [1, 9])
async def test_a_batch_may_have_more_or_fewer_rows_than_the_bounds_of_the_model(
    load: Load, rows: int
) -> None:
    values = np.ones((rows, 3)).tolist()
    assert await ask(await load(bounded((2, 8), 3)), floats(x=values)) == [{"y": values}]


@pytest.mark.parametrize("columns", [1, 9])
async def test_a_shape_outside_of_the_bounds_of_the_model_is_refused(
    load: Load, columns: int
) -> None:
    instance = await load(bounded(-1, (2, 8)))
    with pytest.raises(InferenceError) as caught:
        await ask(instance, floats(x=np.ones((1, columns))))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"unexpected shape for input 'x' of model 'm': found [1,{columns}], the model takes "
        "[?,2..8]",
    )
    assert await ask(instance, floats(x=np.ones((1, 8)))) == [{"y": [[1] * 8]}]


@pytest.mark.parametrize("device", ["CPU", "AUTO", "MULTI:CPU", "HETERO:CPU", "BATCH:CPU(4)"])
async def test_every_device_that_is_the_cpu_computes_in_float32(load: Load, device: str) -> None:
    """Sums of 256 products in bfloat16 differ by a tenth, on CPUs that have it."""
    random = np.random.default_rng(0)
    weights, sent = (random.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    x = port("x", [256, 256])
    made = called("y", op.matmul(x, op.constant(weights), False, False))
    config = ModelConfig(parameters={"TARGET_DEVICE": device})
    instance = await load(openvino.Model([made], [x], "product"), config)
    (found,) = await ask(instance, floats(x=sent))
    assert np.abs(np.array(found["y"]) - sent @ weights).max() < 1e-3


def slow() -> Any:
    """y = x, multiplied again and again by a matrix: seconds of work."""
    x = port("x", [-1, 768])
    weights = op.constant(np.eye(768, dtype=np.float32))
    found = x
    for _ in range(100):
        found = op.matmul(found, weights, False, False)
        found = op.relu(found)
    return openvino.Model([called("y", op.result(found))], [x], "slow")


async def test_a_run_without_a_client_is_cancelled(load: Load) -> None:
    instance = await load(slow(), ModelConfig(max_batch_size=64))
    sent, short = floats(x=np.ones((64, 768))), floats(x=np.ones((1, 768)))

    async def spent_on(request: InferRequest) -> float:
        began = time.process_time()
        await answers(instance, request)
        return time.process_time() - began

    await spent_on(sent)  # the first run of a shape takes longer
    short_spent, whole_spent = await spent_on(short), await spent_on(sent)

    async def leave() -> None:
        async with aclosing(instance.execute([sent])) as found:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(whole_spent / 8):
                    await anext(found)

    # Processor time, since other processes may take a core at any time.
    spent = time.process_time()
    await soon(leave())
    await answers(instance, short)  # it waits for the end of the run
    assert time.process_time() - spent - short_spent < whole_spent / 2


async def test_a_run_after_one_without_a_client_has_its_own_outputs(load: Load) -> None:
    instance = await load(slow(), ModelConfig(max_batch_size=64))
    sent, short = floats(x=np.ones((64, 768))), floats(x=np.ones((1, 768)))
    await answers(instance, sent)
    for secs in (0.001, 0.002, 0.004, 0.008):
        await answers(instance, short)
        async with aclosing(instance.execute([sent])) as found:
            with suppress(TimeoutError):
                async with asyncio.timeout(secs):
                    await anext(found)
        assert await ask(instance, short) == [{"y": [[1.0] * 768]}]


def sums_config(size: int = 2) -> ModelConfig:
    return ModelConfig(
        input=tuple(
            ModelInput(name=name, data_type=DataType.TYPE_FP32, dims=(size,)) for name in "AB"
        ),
        output=tuple(
            ModelOutput(name=name, data_type=DataType.TYPE_FP32, dims=(size,))
            for name in ("SUM", "DIFFERENCE")
        ),
    )


def batched(config: ModelConfig, rows: int) -> ModelConfig:
    return replace(config, max_batch_size=rows)
