"""The echo of inputs, with the delays and counts of its config."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.identity import Behaviour, ExecutionGate, IdentityBackend, IdentityInstance
from gateway.backend import Answer, Instance, ModelContext
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.tensor import Datatype, array_tensor
from tests.builders import soon, text_request, texts
from tests.conftest import tasks_left

TWO = ModelConfig(
    name="two",
    input=tuple(
        ModelInput(name=f"INPUT{n}", data_type=DataType.TYPE_INT32, dims=(1,)) for n in (0, 1)
    ),
    output=tuple(
        ModelOutput(name=f"OUTPUT{n}", data_type=DataType.TYPE_INT32, dims=(1,)) for n in (0, 1)
    ),
)


def context(config: ModelConfig) -> ModelContext:
    def infer(_: InferRequest) -> Any:
        raise AssertionError("an echo asks nobody")

    return ModelContext(
        config=config, path=Path(), store=Path(), infer=infer, wasted=lambda tokens: None
    )


async def load(config: ModelConfig = TWO, **parameters: str) -> Instance:
    return await soon(IdentityBackend().load(context(replace(config, parameters=parameters))))


async def answers(instance: Instance, *requests: InferRequest) -> list[Answer]:
    return await soon(collect(instance, *requests))


async def collect(instance: Instance, *requests: InferRequest) -> list[Answer]:
    return [answer async for answer in instance.execute(requests)]


def numbers(outputs: tuple[str, ...] = (), **inputs: int) -> InferRequest:
    return InferRequest(
        model="two",
        inputs=tuple(
            array_tensor(name, Datatype.INT32, np.array([value])) for name, value in inputs.items()
        ),
        outputs=tuple(RequestedOutput(name) for name in outputs),
    )


def values(answer: Answer) -> dict[str, int]:
    response = answer[1]
    assert isinstance(response, InferResponse)
    return {output.name: output.array().item() for output in response.outputs}


async def test_each_input_is_returned_as_the_output_in_its_place() -> None:
    (answer,) = await answers(await load(), numbers(INPUT0=1, INPUT1=2))
    assert values(answer) == {"OUTPUT0": 1, "OUTPUT1": 2}
    assert answer[0] == 0
    assert isinstance(answer[1], InferResponse)
    assert answer[1].final


async def test_the_order_of_a_request_does_not_matter() -> None:
    (answer,) = await answers(await load(), numbers(INPUT1=2, INPUT0=1))
    assert values(answer) == {"OUTPUT0": 1, "OUTPUT1": 2}
    assert list(values(answer)) == ["OUTPUT0", "OUTPUT1"]


async def test_an_input_that_is_missing_has_no_output() -> None:
    (answer,) = await answers(await load(), numbers(INPUT1=2))
    assert values(answer) == {"OUTPUT1": 2}


async def test_only_requested_outputs_are_returned() -> None:
    (answer,) = await answers(await load(), numbers(("OUTPUT1",), INPUT0=1, INPUT1=2))
    assert values(answer) == {"OUTPUT1": 2}


async def test_without_outputs_in_its_config_inputs_keep_their_names() -> None:
    instance = IdentityInstance(Behaviour())
    (answer,) = await answers(instance, numbers(A=1, B=2))
    assert values(answer) == {"A": 1, "B": 2}


async def test_each_request_of_a_batch_is_answered_under_its_index() -> None:
    found = await answers(await load(), numbers(INPUT0=1), numbers(INPUT0=2))
    assert [(index, values((index, response))) for index, response in found] == [
        (0, {"OUTPUT0": 1}),
        (1, {"OUTPUT0": 2}),
    ]


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_request_gets_the_configured_number_of_responses(count: int) -> None:
    found = [
        response
        for _, response in await answers(await load(responses=str(count)), numbers(INPUT0=1))
    ]
    assert [each.final for each in found if isinstance(each, InferResponse)] == [
        number == count for number in range(1, count + 1)
    ]


async def test_a_model_can_be_set_to_fail() -> None:
    ((_, error),) = await answers(await load(fail="told to"), numbers(INPUT0=1))
    assert isinstance(error, InferenceError)
    assert (error.code, error.message) == (Code.INTERNAL, "told to")


async def test_a_delay_precedes_each_answer() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await answers(await load(delay_us="5000", responses="2"), numbers(INPUT0=1))
    assert loop.time() - began >= 0.01


async def test_answers_wait_while_the_version_folder_has_the_hold_file(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    config = replace(TWO, parameters={"hold_file": "held"})
    loading = replace(context(config), path=tmp_path)
    instance = await soon(IdentityBackend().load(loading))
    answering = asyncio.create_task(collect(instance, numbers(INPUT0=1)))
    await asyncio.sleep(0.05)
    assert not answering.done()
    held.unlink()
    assert len(await soon(answering)) == 1


@pytest.mark.parametrize(("text", "concurrency"), [("1", 1), ("4", 4), ("0", None)])
async def test_zero_executions_at_once_means_any_number(text: str, concurrency: int | None) -> None:
    assert (await load(concurrency=text)).concurrency == concurrency


async def test_without_parameters_an_instance_takes_one_execution_at_a_time() -> None:
    assert (await load()).concurrency == 1


@pytest.mark.parametrize("key", ["delay_us", "responses", "concurrency"])
@pytest.mark.parametrize("text", ["-1", "x", "", "1.5", "\u00b2"])
async def test_a_number_that_is_none_is_refused(key: str, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        await load(**{key: text})
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        f"parameter '{key}' is '{text}', expected a number of at least 0"
    )


async def test_a_model_can_be_set_to_fail_its_load() -> None:
    with pytest.raises(InferenceError, match="no such weights"):
        await load(load_fails="no such weights")


def test_a_config_with_more_outputs_than_inputs_is_refused() -> None:
    backend = IdentityBackend()
    assert backend.complete(TWO, Path()) == TWO
    with pytest.raises(InferenceError) as caught:
        backend.complete(replace(TWO, input=TWO.input[:1]), Path())
    assert caught.value.code is Code.INVALID_ARG
    assert "2 outputs for 1 inputs" in caught.value.message


# Gates.


async def test_a_gate_holds_executions_until_it_is_opened() -> None:
    gate = ExecutionGate()
    instance = await soon(IdentityBackend(gate).load(context(TWO)))
    tasks = [asyncio.create_task(collect(instance, numbers(INPUT0=n))) for n in (1, 2)]
    await soon(gate.reached(2))
    assert gate.waiting == 2
    assert not any(task.done() for task in tasks)
    gate.open()
    assert [values(found[0]) for found in await soon(asyncio.gather(*tasks))] == [
        {"OUTPUT0": 1},
        {"OUTPUT0": 2},
    ]
    assert (gate.waiting, gate.cut) == (0, 0)
    await soon(gate.passed())
    assert tasks_left() == []


async def test_a_gate_counts_the_executions_that_were_cut() -> None:
    gate = ExecutionGate()
    instance = IdentityInstance(Behaviour(gate=gate))
    task = asyncio.create_task(collect(instance, text_request()))
    await soon(gate.reached(1))
    task.cancel()
    await soon(asyncio.wait([task]))
    assert (gate.waiting, gate.cut) == (0, 1)


async def test_an_echo_shows_its_prompt() -> None:
    (answer,) = await answers(IdentityInstance(Behaviour()), text_request("hello"))
    assert isinstance(answer[1], InferResponse)
    assert texts([answer[1]]) == ["hello"]
