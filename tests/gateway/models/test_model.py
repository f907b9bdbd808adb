"""A loaded version: its limits, the death and restart of its instances, and its end."""

from dataclasses import replace

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.limits import Limits
from gateway.observability.statistics import FailureReason
from tests.builders import (
    TEXT,
    ScriptedInstance,
    read_all,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve

# Limits.


@pytest.mark.parametrize(
    ("parameters", "limits"),
    [
        ({}, Limits(max_in_flight=1024, restart_tries=3)),
        ({"max_in_flight": "1"}, Limits(max_in_flight=1, restart_tries=3)),
        ({"restart_tries": "0"}, Limits(max_in_flight=1024, restart_tries=0)),
        ({"other": "x"}, Limits(max_in_flight=1024, restart_tries=3)),
        ({"continue_tries": "2"}, Limits(continue_tries=2)),
    ],
)
def test_limits_are_read_from_the_config(parameters: dict[str, str], limits: Limits) -> None:
    assert Limits.read(replace(TEXT, parameters=parameters)) == limits


@pytest.mark.parametrize(
    ("key", "value", "least"),
    [
        ("max_in_flight", "0", 1),
        ("max_in_flight", "-1", 1),
        ("max_in_flight", "", 1),
        ("max_in_flight", "many", 1),
        ("max_in_flight", "1.5", 1),
        ("restart_tries", "-1", 0),
        ("continue_tries", "once", 0),
        ("restart_tries", "\u00b2", 0),
    ],
)
def test_a_limit_that_is_no_number_is_refused(key: str, value: str, least: int) -> None:
    with pytest.raises(InferenceError) as caught:
        Limits.read(replace(TEXT, parameters={key: value}))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        f"model 'text': parameter '{key}' is '{value}', expected a number of at least {least}"
    )


async def test_requests_are_accepted_up_to_the_limit_and_not_beyond(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=replace(TEXT, parameters={"max_in_flight": "2"}))
    with model.submit(text_request("a")) as first, model.submit(text_request("b")):
        assert len(model.requests) == 2
        with pytest.raises(InferenceError) as caught:
            model.submit(text_request("c"))
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.message == (
            "model 'text' has 2 requests in flight, the most it accepts (its parameter "
            "'max_in_flight'); retry later"
        )
        first.cancel()
        with model.submit(text_request("d")):
            assert len(model.requests) == 2
    assert len(model.requests) == 0


async def test_a_bad_request_is_not_counted(serve: Serve) -> None:
    model = serve(ScriptedInstance())
    with pytest.raises(InferenceError):
        model.submit(InferRequest(model="text"))
    assert (model.statistics.fail.count, model.statistics.pending) == (0, 0)


async def test_a_request_beyond_the_limit_is_counted_as_rejected(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=replace(TEXT, parameters={"max_in_flight": "1"}))
    with model.submit(text_request()):
        await instance.begun()
        with pytest.raises(InferenceError):
            model.submit(text_request())
        assert (model.statistics.fail.count, model.statistics.pending) == (1, 0)
        assert model.statistics.failures[FailureReason.REJECTED] == 1


async def test_a_bad_request_hears_so_even_when_the_model_is_full(serve: Serve) -> None:
    model = serve(ScriptedInstance(), config=replace(TEXT, parameters={"max_in_flight": "1"}))
    with model.submit(text_request()):
        with pytest.raises(InferenceError) as caught:
            model.submit(InferRequest(model="text"))
        assert caught.value.code is Code.INVALID_ARG


async def test_a_request_is_in_flight_until_its_stream_has_ended(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(text_response("half"))
        await soon(stream.batch())
        assert len(model.requests) == 1
        execution.finish("whole")
        assert await soon(read_all(stream)) == ["whole"]
        assert len(model.requests) == 0
