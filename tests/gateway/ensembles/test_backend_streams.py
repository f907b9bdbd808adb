"""Ensembles with decoupled steps, and limits of their calls."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.config import ModelConfig
from gateway.ensembles.steps import MAX_FLOWS
from gateway.errors import Code, InferenceError
from gateway.stream import DEFAULT_LIMIT
from gateway.tensor import text_tensor
from tests.builders import (
    DECOUPLED,
    FLAG,
    TEXT,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve
from tests.gateway.ensembles.chains import Ensemble, call, chain, error_of

# Decoupled members.


def decoupled(*names: str) -> dict[str, ModelConfig]:
    return {name: replace(TEXT, model_transaction_policy=DECOUPLED) for name in names}


async def test_each_response_of_a_decoupled_step_begins_its_own_flow(serve: Serve) -> None:
    ensemble = chain(serve, configs=decoupled("a"), model_transaction_policy=DECOUPLED)
    with ensemble.ask() as stream:
        a = await ensemble["a"].begun()
        a.answer(text_response("one"))
        first = await ensemble["b"].begun()
        a.answer(text_response("two"))
        second = await ensemble["b"].begun()
        second.finish("2")
        assert (await soon(stream.batch()))[0].outputs == (text_tensor("text_output", ["2"]),)
        a.answer(FLAG)
        a.end()
        await settle()
        assert not stream.done
        first.finish("1")
        last = await soon(stream.batch())
    assert [(each.outputs, each.final) for each in last] == [
        ((text_tensor("text_output", ["1"]),), True)
    ]
    assert ensemble["b"].asked == ["one", "two"]


async def test_a_decoupled_step_behind_another_multiplies(serve: Serve) -> None:
    ensemble = chain(serve, configs=decoupled("a", "b"), model_transaction_policy=DECOUPLED)
    with ensemble.ask() as stream:
        a = await ensemble["a"].begun()
        for text in "xy":
            a.answer(text_response(text))
        a.answer(FLAG)
        for text in "xy":
            execution = await ensemble["b"].begun()
            for number in "12":
                execution.answer(text_response(text + number))
            execution.end()
        answers = [text for text in await soon(read_all(stream)) if text]
    assert sorted(answers) == ["x1", "x2", "y1", "y2"]


async def test_no_response_at_all_is_a_final_flag(serve: Serve) -> None:
    ensemble = chain(serve, configs=decoupled("a"), model_transaction_policy=DECOUPLED)
    with ensemble.ask() as stream:
        a = await ensemble["a"].begun()
        a.answer(FLAG)
        a.end()
        [answer] = await soon(stream.batch())
    assert (answer.outputs, answer.final) == ((), True)
    assert ensemble["b"].executions == []


async def test_a_decoupled_step_that_fails_late_ends_the_stream(serve: Serve) -> None:
    ensemble = chain(serve, configs=decoupled("a"), model_transaction_policy=DECOUPLED)
    with ensemble.ask() as stream:
        a = await ensemble["a"].begun()
        a.answer(text_response("one"))
        (await ensemble["b"].begun()).finish("1")
        assert (await soon(stream.batch()))[0].outputs == (text_tensor("text_output", ["1"]),)
        a.answer(InferenceError(Code.INTERNAL, "too late"))
        assert await error_of(stream) == (Code.INTERNAL, "in ensemble 'e', too late")


async def test_a_fast_step_is_blocked_by_a_slow_one_behind_it(serve: Serve) -> None:
    ensemble = chain(serve, configs=decoupled("a"), model_transaction_policy=DECOUPLED)
    most = MAX_FLOWS + 2 * DEFAULT_LIMIT
    with ensemble.ask() as stream:
        a = await ensemble["a"].begun()
        for number in range(2 * most):
            a.answer(text_response(str(number)))
        a.answer(FLAG)
        a.end()
        for _ in range(MAX_FLOWS):
            await ensemble["b"].begun()
        for _ in range(10):
            await settle()
        assert a.taken <= most
        for execution in tuple(ensemble["b"].executions):
            execution.finish("done")
        answers = MAX_FLOWS
        while not stream.done:
            for execution in ensemble["b"].executions[answers:]:
                execution.finish("done")
                answers += 1
            await soon(stream.batch())
    assert len(ensemble["b"].executions) == 2 * most


async def test_a_reader_that_takes_nothing_holds_back_every_step(serve: Serve) -> None:
    ensemble = Ensemble(
        serve,
        call("a", "text_input", "text_output"),
        configs=decoupled("a"),
        model_transaction_policy=DECOUPLED,
    )
    with ensemble.ask():
        a = await ensemble["a"].begun()
        for _ in range(1000):
            a.answer(text_response("more"))
        for _ in range(50):
            await settle()
        assert a.taken <= 4 * DEFAULT_LIMIT
    await soon(a.stopped.wait())


# max_inflight_requests.


async def test_calls_of_one_step_are_limited_over_all_requests(serve: Serve) -> None:
    ensemble = chain(serve, max_inflight_requests=2)
    streams = [ensemble.ask(str(number)) for number in range(4)]
    begun = [await ensemble["a"].begun() for _ in range(2)]
    await settle()
    assert ensemble["a"].asked == ["0", "1"]
    streams[2].cancel()
    begun[1].finish("m1")
    await ensemble["b"].begun()
    await ensemble["a"].begun()
    assert ensemble["a"].asked == ["0", "1", "3"]
    for stream in streams:
        stream.cancel()
    with ensemble.ask("later") as stream:
        (await ensemble["a"].begun()).finish("m")
        (await ensemble["b"].begun()).finish("free again")
        assert await soon(read_all(stream)) == ["free again"]


async def test_a_step_at_its_limit_holds_back_the_one_before_it(serve: Serve) -> None:
    ensemble = chain(
        serve,
        configs=decoupled("a"),
        model_transaction_policy=DECOUPLED,
        max_inflight_requests=1,
    )
    with ensemble.ask() as stream:
        a = await ensemble["a"].begun()
        for number in range(200):
            a.answer(text_response(str(number)))
        a.end()
        execution = await ensemble["b"].begun()
        for _ in range(20):
            await settle()
        assert len(ensemble["b"].executions) == 1
        assert a.taken <= 2 * DEFAULT_LIMIT
        for _ in range(199):
            execution.finish("done")
            execution = await ensemble["b"].begun()
            await soon(stream.batch())
        execution.finish("last")
        assert await soon(read_all(stream)) == ["last"]
    assert ensemble["b"].asked == [str(number) for number in range(200)]


async def test_a_cancelled_call_makes_room_in_the_limit(serve: Serve) -> None:
    ensemble = chain(serve, max_inflight_requests=1)
    first, second = ensemble.ask("1"), ensemble.ask("2")
    await ensemble["a"].begun()
    await settle()
    first.cancel()
    second.cancel()
    with ensemble.ask("3") as stream:
        await settle()
        execution = ensemble["a"].executions[-1]
        assert ensemble["a"].asked[-1] == "3"
        execution.finish("m")
        await soon(ensemble["b"].begun())
        ensemble["b"].executions[-1].finish("through")
        assert await soon(read_all(stream)) == ["through"]


# Members.


async def test_the_limit_of_requests_of_a_member_is_not_for_steps(serve: Serve) -> None:
    ensemble = chain(serve, configs={"a": replace(TEXT, parameters={"max_in_flight": "1"})})
    streams = [ensemble.ask() for _ in range(3)]
    for _ in streams:
        await ensemble["a"].begun()
    with pytest.raises(InferenceError, match="1 requests in flight"):
        ensemble.models["a"].submit(text_request())
    for stream in streams:
        stream.cancel()


async def test_members_are_held_until_the_ensemble_is_closed(serve: Serve) -> None:
    ensemble = chain(serve)
    held = [model.unneeded() for model in ensemble.models.values()]
    for wait in held:
        with pytest.raises(TimeoutError):
            await _at_once(wait)
    await ensemble.instance.close()
    await ensemble.instance.close()
    for model in ensemble.models.values():
        await soon(model.unneeded())


async def _at_once(wait: Any) -> None:
    async with asyncio.timeout(0.01):
        await wait
