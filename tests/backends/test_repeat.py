"""n answers to one request."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.repeat import (
    TRITON_INPUTS,
    TRITON_OUTPUTS,
    RepeatBackend,
    RepeatInstance,
    TritonRepeatInstance,
)
from gateway.backend import Answer, Note
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, array_tensor, text_tensor
from tests.builders import soon, texts
from tests.tensor_backends import context


def asking(text: str = "hi", n: int = 1, delay_us: int | None = None) -> InferRequest:
    inputs = [
        text_tensor("text_input", [text]),
        array_tensor("n", Datatype.INT32, np.array([n])),
    ]
    if delay_us is not None:
        inputs.append(array_tensor("delay_us", Datatype.INT32, np.array([delay_us])))
    return InferRequest(model="repeat", inputs=tuple(inputs))


async def collect(*requests: InferRequest) -> list[Answer]:
    return [answer async for answer in RepeatInstance().execute(requests)]


async def responses(*requests: InferRequest) -> list[InferResponse]:
    found = [response for _, response in await soon(collect(*requests))]
    return [response for response in found if isinstance(response, InferResponse)]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_the_text_is_repeated_and_the_last_time_is_final(count: int) -> None:
    found = await responses(asking("hello", count))
    assert texts(found) == ["hello"] * count
    assert [each.final for each in found] == [False] * (count - 1) + [True]
    assert found[0].outputs[0].name == "text_output"


async def test_zero_times_is_the_flag_alone() -> None:
    (found,) = await responses(asking(n=0))
    assert (found.outputs, found.final) == ((), True)


async def test_a_negative_number_fails_its_own_request_only() -> None:
    found = await soon(collect(asking(n=-1), asking("other")))
    error, response = found[0][1], found[1][1]
    assert isinstance(error, InferenceError)
    assert (error.code, error.message) == (Code.INVALID_ARG, "'n' is -1, expected >= 0")
    assert isinstance(response, InferResponse)
    assert (found[1][0], texts([response])) == (1, ["other"])


async def test_a_delay_precedes_each_answer() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await responses(asking(n=2, delay_us=5000))
    assert loop.time() - began >= 0.01


async def test_any_number_of_executions_run_at_once() -> None:
    instance = RepeatInstance()
    assert instance.concurrency is None
    await soon(instance.close())


def test_a_config_gets_its_tensors_and_becomes_decoupled() -> None:
    config = RepeatBackend().complete(ModelConfig(name="repeat"), Path())
    assert config.decoupled
    assert [(each.name, each.datatype.value, each.optional) for each in config.input] == [
        ("text_input", "BYTES", False),
        ("n", "INT32", False),
        ("delay_us", "INT32", True),
    ]
    assert [(each.name, each.datatype.value) for each in config.output] == [
        ("text_output", "BYTES")
    ]


def test_tensors_that_a_config_has_are_kept() -> None:
    own = (ModelInput(name="n", data_type=DataType.TYPE_INT64, dims=(1,)),)
    assert RepeatBackend().complete(ModelConfig(name="repeat", input=own), Path()).input == own


def tensor(name: str, data_type: DataType = DataType.TYPE_INT32) -> ModelInput:
    return ModelInput(name=name, data_type=data_type, dims=(1,))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ModelConfig(name="m", input=(tensor("TEXT"),)),
            "its config has the tensors TEXT, expected text_input, n, delay_us",
        ),
        (
            ModelConfig(name="m", output=(ModelOutput(name="y", data_type=DataType.TYPE_BOOL),)),
            "its config has the tensors y, expected text_output",
        ),
    ],
)
def test_a_config_of_other_tensors_is_not_loaded(config: ModelConfig, message: str) -> None:
    with pytest.raises(InferenceError) as caught:
        RepeatBackend().complete(config, Path())
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == f"backend 'repeat' cannot load model 'm': {message}"


# Triton's own repeat backend.


def integers(values: Sequence[int], delays: Sequence[int], wait: int = 0) -> InferRequest:
    return InferRequest(
        model="repeat_int32",
        inputs=(
            array_tensor("IN", Datatype.INT32, np.array(values)),
            array_tensor("DELAY", Datatype.UINT32, np.array(delays)),
            array_tensor("WAIT", Datatype.UINT32, np.array([wait])),
        ),
    )


async def told(request: InferRequest, *, decoupled: bool = True) -> list[Any]:
    """OUT and IDX of each response, "final", "freed", or the error's message."""
    found: list[Any] = []
    async for _, answer in TritonRepeatInstance(decoupled=decoupled).execute([request]):
        if isinstance(answer, Note):
            found.append("freed")
        elif isinstance(answer, InferenceError):
            found.append(answer.message)
        else:
            found += [tuple(int(each.array().item()) for each in answer.outputs)] * bool(
                answer.outputs
            )
            found += ["final"] * answer.final
    return found


def test_tritons_config_is_kept_as_it_is() -> None:
    config = ModelConfig(name="repeat_int32", input=TRITON_INPUTS, output=TRITON_OUTPUTS)
    assert RepeatBackend().complete(config, Path()) == config
    assert RepeatBackend().complete(replace(config, output=()), Path()) == config


IN, DELAY, WAIT = TRITON_INPUTS
OUT, IDX = TRITON_OUTPUTS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_size": 4}, "repeat backend only supports models with max_batch_size == 0"),
        ({"input": (IN, DELAY)}, "expected 3 inputs, got 2"),
        ({"output": (OUT,)}, "expected 2 outputs, got 1"),
        (
            {"input": (IN, tensor("n"), WAIT)},
            "expected second input tensor name to be DELAY, got n",
        ),
        (
            {"output": (replace(OUT, name="y"), IDX)},
            "expected first output tensor name to be OUT, got y",
        ),
        (
            {"input": (replace(IN, dims=(2, 2)), DELAY, WAIT)},
            "expected IN shape to have one dimension, got [2,2]",
        ),
        (
            {"input": (replace(IN, dims=(3,)), DELAY, WAIT)},
            "expected IN and DELAY shape to match, got [3] and [-1]",
        ),
        (
            {"input": (IN, DELAY, replace(WAIT, dims=(2,)))},
            "expected WAIT shape to be [1], got [2]",
        ),
        ({"output": (replace(OUT, dims=(-1,)), IDX)}, "expected OUT shape to be [1], got [-1]"),
        ({"output": (OUT, replace(IDX, dims=(1, 1)))}, "expected IDX shape to be [1], got [1,1]"),
        (
            {"input": (IN, replace(DELAY, data_type=DataType.TYPE_INT32), WAIT)},
            "expected DELAY datatype to be UINT32, got TYPE_INT32",
        ),
    ],
)
async def test_another_config_of_tritons_is_refused_with_its_text(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = ModelConfig(name="m", input=TRITON_INPUTS, output=TRITON_OUTPUTS)
    config = replace(config, **fields)
    with pytest.raises(InferenceError) as completed:
        RepeatBackend().complete(config, Path())
    with pytest.raises(InferenceError) as loaded:
        await RepeatBackend().load(context(config, tmp_path))
    for caught in (completed, loaded):
        assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, message)


def test_tensors_of_tritons_model_may_have_any_order() -> None:
    config = ModelConfig(name="m", input=(WAIT, DELAY, IN), output=(IDX, OUT))
    assert RepeatBackend().complete(config, Path()) == config


async def test_each_element_is_a_response_and_the_flag_is_sent_alone() -> None:
    assert await soon(told(integers([7, -5], [0, 0]))) == [(7, 0), (-5, 1), "final"]
    assert await soon(told(integers([], []))) == ["final"]


async def test_a_model_that_is_not_decoupled_has_one_final_response() -> None:
    assert await soon(told(integers([7], [0]), decoupled=False)) == [(7, 0), "final"]


async def test_the_instance_is_free_after_its_wait() -> None:
    assert await soon(told(integers([7, 8], [1, 200], 20))) == [(7, 0), "freed", (8, 1), "final"]


async def test_an_execution_lasts_as_long_as_its_wait() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await soon(told(integers([7], [0], 30))) == [(7, 0), "final"]
    assert loop.time() - began >= 0.03


async def test_delays_of_another_number_are_refused() -> None:
    assert await soon(told(integers([7], [0, 0]))) == [
        "expected IN and DELAY shape to match, got [1] and [2]"
    ]
