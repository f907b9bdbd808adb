"""n answers to one request."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from backends.repeat import RepeatBackend, RepeatInstance
from gateway.backend import Answer
from gateway.config import ModelConfig, ModelInput
from gateway.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, array_tensor, text_tensor
from tests.builders import soon, texts


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


async def test_a_delay_comes_before_each_answer() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await responses(asking(n=2, delay_us=5000))
    assert loop.time() - began >= 0.01


async def test_any_number_of_executions_run_at_once() -> None:
    instance = await soon(RepeatBackend().load(None))  # type: ignore[arg-type]
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
