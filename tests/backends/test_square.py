"""IN answers to a request with the number IN."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.square import INPUT, OUTPUT, SquareBackend, SquareInstance, SquareSettings
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.in_process.server import Server
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, array_tensor
from tests.builders import add_model, soon
from tests.tensor_backends import context

SERVED = ModelConfig(name="m", input=(INPUT,), output=(OUTPUT,))


def request(*numbers: int, shape: tuple[int, ...] = (1,)) -> InferRequest:
    values = np.array(numbers, np.int32).reshape(shape)
    return InferRequest(model="m", inputs=(array_tensor("IN", Datatype.INT32, values),))


async def collected(asked: InferRequest, **parameters: str) -> list[Any]:
    """OUT of each response, or the message of its error; "final"."""
    instance = SquareInstance(SquareSettings.read(replace(SERVED, parameters=parameters)))
    found: list[Any] = []
    async for _, answer in instance.execute([asked]):
        if isinstance(answer, InferResponse):
            found += [answer.error.message] if answer.error else []
            found += [each.array().tolist() for each in answer.outputs]
            found += ["final"] * answer.final
        elif isinstance(answer, InferenceError):
            found.append(answer.message)
    return found


async def test_a_number_is_answered_as_often_as_it_says() -> None:
    assert await soon(collected(request(3))) == [[3], [3], [3], "final"]
    assert await soon(collected(request(2, shape=(1, 1)))) == [[[2]], [[2]], "final"]
    assert await soon(collected(request(0))) == ["final"]


async def test_the_last_responses_are_empty_and_those_before_them_fail() -> None:
    counts = {"CUSTOM_FAIL_COUNT": "1", "CUSTOM_EMPTY_COUNT": "2"}
    assert await soon(collected(request(4), **counts)) == [[4], "simulated failure", "final"]
    assert await soon(collected(request(2), **counts)) == ["final"]
    assert await soon(collected(request(3), **counts)) == ["simulated failure", "final"]


@pytest.mark.parametrize("key", ["CUSTOM_INFER_DELAY_NS", "CUSTOM_OUTPUT_DELAY_NS"])
async def test_a_delay_precedes_each_response(key: str) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await soon(collected(request(3), **{key: "20000000"})) == [[3], [3], [3], "final"]
    assert loop.time() - began >= 0.06


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(-1), "'IN' is -1, expected >= 0"),
        (request(1, 1, shape=(2, 1)), "unexpected shape for IN input: [2, 1], expected one el"),
        (InferRequest(model="m"), "input 'IN' is missing"),
    ],
)
async def test_a_wrong_number_fails_its_request(asked: InferRequest, message: str) -> None:
    (found,) = await soon(collected(asked))
    assert found.startswith(message)


def test_the_model_is_served_without_tensors_in_its_config(tmp_path: Path) -> None:
    add_model(tmp_path, "m", "backend: 'square'")
    with Server(model_repository=tmp_path) as server:
        model = server.model("m")
        assert [each.outputs["OUT"].tolist() for each in model.infer(inputs={"IN": [3]})] == [
            [3]
        ] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(SERVED, input=(INPUT, INPUT)), "expected 1 input, got 2"),
        (replace(SERVED, output=(OUTPUT, OUTPUT)), "expected 1 output, got 2"),
        (
            replace(SERVED, input=(replace(INPUT, name="X"),)),
            "expected first input tensor name to be IN, got X",
        ),
        (
            replace(SERVED, output=(replace(OUTPUT, dims=(2,)),)),
            "expected OUT shape to be [1], got [2]",
        ),
        (
            replace(SERVED, input=(replace(INPUT, data_type=DataType.TYPE_INT64),)),
            "expected IN datatype to be INT32, got TYPE_INT64",
        ),
        (
            replace(SERVED, parameters={"CUSTOM_FAIL_COUNT": "x"}),
            "parameter 'CUSTOM_FAIL_COUNT': failed to convert 'x' to integral number",
        ),
    ],
)
async def test_other_configs_are_not_loaded(config: ModelConfig, message: str) -> None:
    backend = SquareBackend()
    with pytest.raises(InferenceError) as caught:
        await backend.load(context(backend.complete(config, Path()), Path()))
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, message)
