"""Requests on their way through ensembles of models that a test drives by hand."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.config import ModelConfig
from gateway.config.scheduling import EnsembleScheduling, EnsembleStep
from gateway.ensembles.backend import EnsembleInstance
from gateway.errors import Code, InferenceError, died, no_instance
from gateway.messages import InferResponse, Phases, RequestedOutput, SequenceTag
from tests.builders import (
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


def join(model: str, *sources: str, target: str = "text_output") -> EnsembleStep:
    """A call of a model with an input for each source: `0`, `1`, ..."""
    inputs = {str(number): source for number, source in enumerate(sources)}
    return EnsembleStep(
        model_name=model,
        model_version=-1,
        input_map=inputs,
        output_map={"text_output": target},
    )


def joining(count: int, *, optional: bool = False) -> ModelConfig:
    """The config of a model with `count` inputs."""
    return replace(
        TEXT,
        name="join",
        input=tuple(
            replace(TEXT.input[0], name=str(number), optional=optional) for number in range(count)
        ),
    )


def fork(serve: Serve, **options: Any) -> Ensemble:
    """`a`, then `b` and `c` side by side, then `join`."""
    steps = (
        call("a", "text_input", "m"),
        call("b", "m", "l"),
        call("c", "m", "r"),
        join("join", "l", "r"),
    )
    return Ensemble(serve, *steps, configs={"join": joining(2)}, **options)


# Data flow.


async def test_steps_start_once_their_inputs_are_there_and_side_by_side(serve: Serve) -> None:
    ensemble = fork(serve)
    with ensemble.ask("x") as stream:
        (await ensemble["a"].begun()).finish("from a")
        c, b = await ensemble["c"].begun(), await ensemble["b"].begun()
        c.finish("from c")
        await settle()
        assert ensemble["join"].executions == []
        b.finish("from b")
        (await ensemble["join"].begun()).finish("joined")
        assert await soon(read_all(stream)) == ["joined"]
    assert ensemble["join"].asked == ["from b", "from c"]


async def test_steps_without_requested_outputs_do_not_run(serve: Serve) -> None:
    steps = (call("a", "text_input", "Y"), call("b", "text_input", "Z"))
    ensemble = Ensemble(serve, *steps, outputs="Y Z")
    with ensemble.ask(outputs=(RequestedOutput("Z"),)) as stream:
        (await ensemble["b"].begun()).finish("only this")
        answer = await soon(stream.only())
    assert [output.name for output in answer.outputs] == ["Z"]
    assert ensemble["a"].executions == []
    with ensemble.ask() as stream:
        (await ensemble["b"].begun()).finish("second")
        (await ensemble["a"].begun()).finish("first")
        answer = await soon(stream.only())
    assert [output.name for output in answer.outputs] == ["Y", "Z"]


async def test_a_step_has_the_id_and_parameters_of_the_request(serve: Serve) -> None:
    ensemble = chain(serve)
    said = {
        "id": "r1",
        "parameters": {"custom": "c", "n": 3},
        "sequence": SequenceTag(9, start=True),
        "priority": 2,
        "timeout_us": 123456,
    }
    with ensemble.ask(**said) as stream:
        execution = await ensemble["a"].begun()
        [asked] = execution.requests
        execution.finish("")
        assert {name: getattr(asked, name) for name in said} == said
        assert (asked.model, [each.name for each in asked.outputs]) == ("a", ["text_output"])
        execution = await ensemble["b"].begun()
        [asked] = execution.requests
        execution.finish("")
        assert {name: getattr(asked, name) for name in said} == said
        answer = await soon(stream.only())
    assert answer.parameters == {"sequence_id": 9, "sequence_start": True, "sequence_end": False}


async def test_a_response_may_change_the_sequence_of_later_steps(serve: Serve) -> None:
    ensemble = chain(serve)
    with ensemble.ask(sequence=SequenceTag(9, start=True)) as stream:
        told = {"sequence_id": "other", "sequence_end": True, "foo": "bar"}
        execution = await ensemble["a"].begun()
        execution.answer(replace(text_response("m", final=True), parameters=told))
        execution.end()
        execution = await ensemble["b"].begun()
        assert execution.requests[0].sequence == SequenceTag("other", start=False, end=True)
        execution.finish("")
        answer = await soon(stream.only())
    assert answer.parameters == {
        "sequence_id": "other",
        "sequence_start": False,
        "sequence_end": True,
    }


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (
            {"sequence_id": 1.5},
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or "
            "TRITONSERVER_PARAMETER_STRING",
        ),
        (
            {"sequence_start": 1},
            "expect parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL",
        ),
        (
            {"sequence_end": "x"},
            "expect parameter 'sequence_end' to be TRITONSERVER_PARAMETER_BOOL",
        ),
    ],
)
async def test_sequence_parameters_of_a_response_must_have_the_right_type(
    serve: Serve, parameters: dict[str, Any], problem: str
) -> None:
    ensemble = chain(serve)
    with ensemble.ask() as stream:
        execution = await ensemble["a"].begun()
        execution.answer(replace(text_response("m", final=True), parameters=parameters))
        assert await error_of(stream) == (Code.INVALID_ARG, f"in ensemble 'e', {problem}")


async def test_a_missing_tensor_is_an_omitted_input(serve: Serve) -> None:
    steps = (call("a", "text_input", "m"), join("b", "text_input", "m"))
    ensemble = Ensemble(serve, *steps, configs={"b": joining(2, optional=True)})
    with ensemble.ask("x") as stream:
        execution = await ensemble["a"].begun()
        execution.answer(InferResponse(final=True))
        execution.end()
        execution = await ensemble["b"].begun()
        assert [tensor.name for tensor in execution.requests[0].inputs] == ["0"]
        execution.finish("made")
        assert await soon(read_all(stream)) == ["made"]


async def test_the_phases_of_members_are_summed(serve: Serve) -> None:
    ensemble = chain(serve)
    with ensemble.ask() as stream:
        for name in "ab":
            execution = await ensemble[name].begun()
            answer = replace(text_response("m", final=True), phases=Phases(1, 2, 3))
            execution.answer(answer)
            execution.end()
        answer = await soon(stream.only())
    assert answer.phases == Phases(2, 4, 6)


# Failures.


async def test_the_death_of_a_step_is_that_of_the_request(serve: Serve) -> None:
    ensemble = fork(serve)
    with ensemble.ask() as stream:
        (await ensemble["a"].begun()).answer(died("its worker has ended"))
        with pytest.raises(InferenceError, match="in ensemble 'e', its worker has ended") as caught:
            await soon(stream.only())
    assert caught.value.dead_instance == ensemble["a"].number


@pytest.mark.parametrize("queued", [False, True], ids=["refused", "queued"])
@pytest.mark.parametrize("lacking", ["a", "b"])
async def test_a_request_was_not_executed_only_if_its_first_step_has_no_instance(
    serve: Serve, lacking: str, *, queued: bool
) -> None:
    ensemble = chain(serve)
    ensemble.models[lacking].instances.able = queued
    with ensemble.ask() as stream:
        if lacking == "b":
            (await ensemble["a"].begun()).finish("m")
        if queued:
            (await ensemble[lacking].begun()).answer(no_instance("no restart is left"))
        with pytest.raises(InferenceError, match="in ensemble 'e', ") as caught:
            await soon(stream.only())
    assert caught.value.dead_instance is None
    assert caught.value.lacks_instance is (lacking == "a")


async def test_the_first_step_that_fails_ends_the_request_and_stops_the_others(
    serve: Serve,
) -> None:
    ensemble = fork(serve)
    with ensemble.ask() as stream:
        (await ensemble["a"].begun()).finish("m")
        b, c = await ensemble["b"].begun(), await ensemble["c"].begun()
        b.answer(InferenceError(Code.NOT_FOUND, "no way"))
        assert await error_of(stream) == (Code.NOT_FOUND, "in ensemble 'e', no way")
        await soon(c.stopped.wait())
    assert ensemble["join"].executions == []
    with ensemble.ask() as stream:
        (await ensemble["a"].begun()).finish("m")
        for name in "bc":
            (await ensemble[name].begun()).finish("")
        (await ensemble["join"].begun()).finish("well")
        assert await soon(read_all(stream)) == ["well"]


async def test_a_request_that_a_member_refuses_ends_the_ensemble_s(serve: Serve) -> None:
    ensemble = Ensemble(
        serve,
        call("a", "text_input", "m"),
        join("b", "text_input", "m"),
        configs={"b": joining(2)},
    )
    with ensemble.ask("x", id="r1") as stream:
        execution = await ensemble["a"].begun()
        execution.answer(InferResponse(final=True))
        execution.end()
        assert await error_of(stream) == (
            Code.INVALID_ARG,
            "in ensemble 'e', [request id: r1] expected 2 inputs but got 1 inputs for model 'b'. "
            "Got input(s) ['0'], but missing required input(s) ['1']. Please provide all required "
            "input(s).",
        )


async def test_a_member_without_a_response_is_a_deadlock(serve: Serve) -> None:
    ensemble = chain(serve)
    with ensemble.ask() as stream:
        (await ensemble["a"].begun()).end()
        assert await error_of(stream) == (
            Code.INVALID_ARG,
            "in ensemble 'e', [request id: <id_unknown>] unexpected deadlock, at least one output "
            "is not set while no more ensemble steps can be made",
        )


async def test_a_member_that_is_not_decoupled_answers_once(serve: Serve) -> None:
    ensemble = chain(serve)
    with ensemble.ask() as stream:
        execution = await ensemble["a"].begun()
        execution.answer(text_response("one"))
        execution.answer(text_response("two", final=True))
        code, message = await error_of(stream)
    assert (code, message) == (
        Code.INTERNAL,
        "in ensemble 'e', expected a single response of model 'a', got more",
    )


async def test_a_final_flag_behind_the_answer_is_fine(serve: Serve) -> None:
    ensemble = chain(serve)
    with ensemble.ask() as stream:
        for name in "ab":
            execution = await ensemble[name].begun()
            execution.answer(text_response(name))
            await settle()
            execution.answer(FLAG)
            execution.end()
        assert await soon(read_all(stream)) == ["b"]


async def test_a_crash_of_a_member_is_reported_without_its_text(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    ensemble = chain(serve)
    with ensemble.ask() as stream:
        (await ensemble["a"].begun()).crash(RuntimeError("in /some/folder"))
        code, message = await error_of(stream)
    assert code is Code.INTERNAL
    assert message.startswith("in ensemble 'e', ")
    assert "/some/folder" not in message
    assert [record.message for record in caplog.records] == ["execution failed"]


# Disconnects.


async def test_a_disconnect_cancels_every_step(serve: Serve) -> None:
    ensemble = fork(serve)
    with ensemble.ask():
        (await ensemble["a"].begun()).finish("m")
        b, c = await ensemble["b"].begun(), await ensemble["c"].begun()
    await soon(b.stopped.wait())
    await soon(c.stopped.wait())
    await settle()
    assert ensemble["join"].executions == []
    assert [len(model.requests) for model in ensemble.models.values()] == [0, 0, 0, 0]


async def test_a_request_cancelled_before_its_start_starts_no_step(serve: Serve) -> None:
    ensemble = chain(serve)
    ensemble.ask().cancel()
    await settle()
    assert ensemble["a"].executions == []


async def test_an_ensemble_within_an_ensemble_stops_too(serve: Serve) -> None:
    inner = chain(serve)
    config = replace(
        TEXT,
        name="outer",
        ensemble_scheduling=EnsembleScheduling(
            step=(call("e", "text_input", "m"), call("e", "m", "text_output"))
        ),
    )
    outer = serve(EnsembleInstance(config, {("e", -1): inner.model}), config=config)
    with outer.submit(text_request("x", model="outer")) as stream:
        for name, text in zip("abab", ("1", "2", "3", "4"), strict=True):
            (await inner[name].begun()).finish(text)
        assert await soon(read_all(stream)) == ["4"]
    with outer.submit(text_request("x", model="outer")):
        execution = await inner["a"].begun()
    await soon(execution.stopped.wait())
