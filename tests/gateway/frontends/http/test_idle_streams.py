"""The tasks and objects of a silent stream of events."""

import gc
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from starlette.requests import Request

from backends.repeat import RepeatBackend, RepeatInstance
from gateway.config import ModelConfig
from tests.builders import settle
from tests.conftest import Serve, tasks_left
from tests.exchange import Exchange
from tests.gateway.frontends.http.apps import SETTINGS, app_of

REPEAT = RepeatBackend().complete(ModelConfig(name="repeat", backend="repeat"), Path())


@pytest.mark.parametrize("first_response_secs", [0.01, 60.0])
async def test_an_idle_stream_takes_two_tasks_and_nothing_of_the_application(
    serve: Serve, first_response_secs: float
) -> None:
    model = serve(RepeatInstance(), config=REPEAT)
    app = app_of(model, settings=replace(SETTINGS, first_response_secs=first_response_secs))
    await settle()
    before, of_others = len(tasks_left()), requests()
    asked = orjson.dumps({"text_input": "hi", "n": 1, "delay_us": 10**9})
    async with Exchange(app, "/v2/models/repeat/generate_stream", asked) as exchange:
        if first_response_secs < 1:
            await exchange.start()
        await settle()
        assert len(model.requests) == 1
        # The task of the connection and that of the execution.
        assert len(tasks_left()) - before == 2
        assert [each for each in requests() if each not in of_others] == []


def requests() -> list[Request]:
    """The requests that are alive; other tests may have left some."""
    return [each for each in gc.get_objects() if isinstance(each, Request)]
