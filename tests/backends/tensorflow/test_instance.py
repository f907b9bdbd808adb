"""Runs of TensorFlow models: batches, datatypes, requests without clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, Tensor
from tests.backends.tensorflow.models import (
    MadeModel,
    backend,
    save,
    save_doubling,
    save_graph_def,
    scaled,
    sums,
    unchanged,
)
from tests.builders import soon
from tests.tensor_backends import Load, answers, ask, floats, loading, request

SAVED_MODEL = ModelConfig(backend="tensorflow", platform="tensorflow_savedmodel")
GRAPH_DEF = ModelConfig(
    backend="tensorflow",
    platform="tensorflow_graphdef",
    max_batch_size=8,
    input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(2,)),),
    output=(ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(2,)),),
)

ONE_TYPE = [
    (tf.bool, Datatype.BOOL, [[True, False]]),
    (tf.uint8, Datatype.UINT8, [[0, 255]]),
    (tf.uint16, Datatype.UINT16, [[0, 2**16 - 1]]),
    (tf.uint32, Datatype.UINT32, [[0, 2**32 - 1]]),
    (tf.uint64, Datatype.UINT64, [[0, 2**63]]),
    (tf.int8, Datatype.INT8, [[-128, 127]]),
    (tf.int16, Datatype.INT16, [[-(2**15), 1]]),
    (tf.int32, Datatype.INT32, [[-(2**31), 1]]),
    (tf.int64, Datatype.INT64, [[-(2**63), 1]]),
    (tf.float16, Datatype.FP16, [[0.5, -2.0]]),
    (tf.float32, Datatype.FP32, [[0.25, -1e30]]),
    (tf.float64, Datatype.FP64, [[0.1, -1e300]]),
    (tf.bfloat16, Datatype.BF16, [[0x3F80, 0x4000]]),
    (tf.string, Datatype.BYTES, [[b"\xff\x00\xfe", b"ends in a zero\0"]]),
]


@pytest.fixture
async def load(folder: Path) -> AsyncIterator[Load]:
    """Write a SavedModel, complete its config, load it; closed when the test ends."""
    async with loading(folder, backend, save) as make:

        async def made(model: Any, config: ModelConfig = SAVED_MODEL) -> Any:
            return await make(model, config)

        yield made


@pytest.mark.parametrize(("kind", "datatype", "values"), ONE_TYPE)
async def test_each_datatype_is_taken_and_returned(
    load: Load, kind: Any, datatype: Datatype, values: Any
) -> None:
    dtype = {Datatype.BYTES: object, Datatype.BF16: np.uint16}.get(
        datatype, None if datatype is Datatype.BYTES else kind.as_numpy_dtype
    )
    sent = np.array(values, dtype)
    instance = await load(unchanged(kind))
    assert await ask(instance, request({"x": sent}, datatype)) == [{"y": sent.tolist()}]


async def test_bfloat16_is_computed(load: Load) -> None:
    instance = await load(sums((None, 1), tf.bfloat16))
    one = np.array([[0x3F80]], np.uint16)
    (found,) = await ask(instance, request({"A": one, "B": one}, Datatype.BF16))
    assert found == {"SUM": [[0x4000]], "DIFFERENCE": [[0]]}


async def test_bytes_that_are_no_text_reach_the_model(load: Load) -> None:
    made = MadeModel(x=(tf.string, (None, 1)))
    with made as inputs:
        made.outputs["length"] = tf.strings.length(inputs["x"])
        made.outputs["twice"] = tf.strings.join([inputs["x"], inputs["x"]])
    instance = await load(made)
    sent = np.array([[b"\xff\x00"], [b""]], object)
    (found,) = await ask(instance, request({"x": sent}, Datatype.BYTES))
    assert found == {"length": [[2], [0]], "twice": [[b"\xff\x00\xff\x00"], [b""]]}


async def test_scalars_of_a_model_without_batches_have_one_element(load: Load) -> None:
    made = MadeModel(x=(tf.float32, ()), s=(tf.string, ()))
    with made as inputs:
        made.outputs["y"] = inputs["x"] * 2
        made.outputs["t"] = tf.strings.upper(inputs["s"])
    instance = await load(made)
    both = (*floats(x=[3]).inputs, *request({"s": [b"a"]}, Datatype.BYTES).inputs)
    assert await ask(instance, InferRequest(model="m", inputs=both)) == [{"t": [b"A"], "y": [6]}]


async def test_scalars_of_a_batch_are_reshaped(load: Load) -> None:
    instance = await load(unchanged(shape=(None,)))
    assert await ask(instance, floats(x=[[3], [4]])) == [{"y": [[3], [4]]}]


async def test_requests_of_one_batch_get_their_own_rows(load: Load) -> None:
    instance = await load(sums((None, 1)), replace(SAVED_MODEL, max_batch_size=8))
    asked = [floats(A=[[n]] * n, B=[[1]] * n) for n in (1, 2, 3)]
    assert [each["SUM"] for each in await ask(instance, *asked)] == [
        [[n + 1]] * n for n in (1, 2, 3)
    ]


async def test_only_the_requested_outputs_are_computed(load: Load) -> None:
    made = MadeModel(x=(tf.float32, (None, 2)))
    with made as inputs:
        made.outputs["fails"] = tf.reshape(inputs["x"], [-1, 7])
        made.outputs["works"] = tf.nn.relu(inputs["x"])
    instance = await load(made)
    sent = np.array([[1, -1]], np.float32)
    (found,) = await ask(instance, request({"x": sent}, outputs=["works"]))
    assert found == {"works": [[1, 0]]}
    with pytest.raises(InferenceError) as caught:
        await answers(instance, request({"x": sent}, outputs=["fails"]))
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == (
        "model 'm' failed: Input to reshape is a tensor with 2 values, but the requested shape "
        "requires a multiple of 7"
    )


async def test_any_choice_of_outputs_is_computed(load: Load) -> None:
    """More choices than functions of a session are kept."""
    made = MadeModel(x=(tf.float32, (None, 1)))
    with made as inputs:
        for place in range(6):
            made.outputs[f"y{place}"] = inputs["x"] + place
    instance = await load(made)
    for choice in [*range(1, 64), 1]:
        names = [f"y{place}" for place in range(6) if choice >> place & 1]
        (found,) = await ask(instance, request({"x": np.ones((1, 1), np.float32)}, outputs=names))
        assert found == {name: [[1 + int(name[1])]] for name in names}


async def test_an_output_that_is_an_input_is_returned(load: Load) -> None:
    made = unchanged()
    made.outputs["same"] = made.inputs["x"]
    (found,) = await ask(await load(made), floats(x=[[1, 2]]))
    assert found == {"same": [[1, 2]], "y": [[1, 2]]}


@pytest.mark.parametrize("offset", [0, 1])
async def test_inputs_in_the_body_of_a_request_are_accepted(load: Load, offset: int) -> None:
    """They cannot be written, and begin at any offset."""
    body = bytes(offset) + np.array([[-1, 2]], np.float32).tobytes()
    tensor = Tensor("x", Datatype.FP32, (1, 2), memoryview(body)[offset:])
    made = MadeModel(x=(tf.float32, (None, 2)))
    with made as inputs:
        made.outputs["y"] = tf.nn.relu(inputs["x"])
    instance = await load(made)
    assert await ask(instance, InferRequest(model="m", inputs=(tensor,))) == [{"y": [[0, 2]]}]
    assert np.frombuffer(body[offset:], np.float32).tolist() == [-1, 2]


async def test_responses_stay_as_they_are_when_inputs_change(load: Load) -> None:
    """An identity would answer with the memory of its input."""
    memory = np.zeros(64 + 16, np.float32)
    start = (-memory.ctypes.data % 64) // 4
    part = memory[start : start + 2]
    part[:] = [1, 2]
    instance = await load(unchanged())
    tensor = Tensor("x", Datatype.FP32, (1, 2), part.data.cast("B"))
    ((_, first),) = await answers(instance, InferRequest(model="m", inputs=(tensor,)))
    part[:] = 7
    assert isinstance(first, InferResponse)
    assert first.outputs[0].array().tolist() == [[1, 2]]


@pytest.mark.parametrize("width", [15, 17])
async def test_rows_of_another_width_than_the_models_are_refused(load: Load, width: int) -> None:
    any_width = replace(
        SAVED_MODEL,
        max_batch_size=4,
        input=tuple(
            ModelInput(name=name, data_type=DataType.TYPE_FP32, dims=(-1,)) for name in "AB"
        ),
    )
    instance = await load(sums(), any_width)
    rows = np.ones((1, width))
    with pytest.raises(InferenceError) as caught:
        await answers(instance, floats(A=rows, B=rows))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        f"unexpected shape for input 'A' of model 'm': found [1,{width}], the model takes [-1,16]"
    )
    ones = np.ones((1, 16))
    assert (await ask(instance, floats(A=ones, B=ones)))[0]["SUM"] == [[2] * 16]


async def test_a_request_that_fails_leaves_its_batch_alone(load: Load) -> None:
    made = MadeModel(x=(tf.float32, (None, 1)))
    with made as inputs:
        check = tf.debugging.assert_non_negative(inputs["x"])
        with tf.control_dependencies([check]):
            made.outputs["y"] = tf.identity(inputs["x"])
    instance = await load(made)
    found = dict(await answers(instance, *[floats(x=[[n]]) for n in (1, -1, 2)]))
    assert isinstance(found[1], InferenceError)
    assert "\n" not in found[1].message
    assert str(Path(__file__).parent) not in found[1].message
    for place, value in ((0, 1), (2, 2)):
        response = found[place]
        assert isinstance(response, InferResponse)
        assert response.outputs[0].array().tolist() == [[value]]


async def test_variables_of_a_saved_model_are_read(load: Load) -> None:
    instance = await load(scaled(3.0))
    assert await ask(instance, floats(x=[[1, 2]])) == [{"y": [[3, 6]]}]


async def test_a_model_of_tensorflow_2_is_served(load: Load, folder: Path) -> None:
    save_doubling(folder)
    assert await ask(await load(None), floats(x=[[1, 2]])) == [{"y": [[2, 4]]}]


async def test_a_graph_def_is_served(load: Load, folder: Path) -> None:
    save_graph_def(unchanged(), folder)
    assert await ask(await load(None, GRAPH_DEF), floats(x=[[1, 2]])) == [{"y": [[1, 2]]}]


@pytest.mark.parametrize("place", ["", ".."])
async def test_operations_of_a_file_initialise_a_graph_def(
    load: Load, folder: Path, place: str
) -> None:
    save_graph_def(scaled(5.0), folder)
    (folder / place / "init_ops.json").write_text('{"init_ops": ["init"]}')
    config = replace(GRAPH_DEF, parameters={"TF_INIT_OPS_FILE": "init_ops.json"})
    assert await ask(await load(None, config), floats(x=[[1, 2]])) == [{"y": [[5, 10]]}]


async def test_a_run_without_a_client_ends_and_the_next_one_is_answered(load: Load) -> None:
    made = MadeModel(x=(tf.float32, (None, 256)))
    with made as inputs:
        found = inputs["x"]
        for _ in range(100):
            found = tf.nn.relu(tf.matmul(found, tf.eye(256)))
        made.outputs["y"] = found
    instance = await load(made, replace(SAVED_MODEL, max_batch_size=256))
    sent = floats(x=np.ones((256, 256)))
    loop = asyncio.get_running_loop()
    await answers(instance, sent)  # the first run also optimises the graph
    began = loop.time()
    await answers(instance, sent)
    whole = loop.time() - began

    async def leave() -> None:
        async with aclosing(instance.execute([sent])) as answered:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(whole / 8):
                    await anext(answered)

    await soon(leave())
    (after,) = await ask(instance, floats(x=np.ones((1, 256))))
    assert after == {"y": [[1] * 256]}
