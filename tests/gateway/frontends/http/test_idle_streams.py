"""The tasks and objects of a silent stream of events, and of a lost connection."""

import asyncio
import gc
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from starlette.requests import Request

from backends.repeat import RepeatBackend, RepeatInstance
from gateway.config import ModelConfig
from gateway.frontends.http.connection import BoundedProtocol
from gateway.frontends.http.listener import HttpListener, listening_at
from tests.builders import settle, soon, uncollected
from tests.conftest import Serve, tasks_left
from tests.exchange import Exchange
from tests.gateway.frontends.http.apps import SETTINGS, app_of
from tests.raw import get, post

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


STREAM = "/v2/models/repeat/generate_stream"
SENT = {
    "before a request": b"",
    "in a head": b"GET / HTTP/1.1\r\n",
    "in a body": post("/v2/models/repeat/generate", b"{}")[:-1],
    "in a stream": post(STREAM, b'{"text_input": "hi", "n": 2, "delay_us": 1000000}'),
    "after a stream": post(STREAM, b'{"text_input": "hi", "n": 1, "delay_us": 0}'),
    "after a response": get("/v2/health/ready"),
    "after a refusal": b"GET /\r\n\r\n",
}
"""The bytes of a client that disconnects after them."""
ANSWERED_SECS = 0.1


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_a_lost_connection_is_freed_without_garbage_collection(
    serve: Serve, sent: bytes
) -> None:
    app = app_of(serve(RepeatInstance(), config=REPEAT))
    listener = HttpListener(app, listening_at("127.0.0.1", 0))
    serving = asyncio.create_task(listener.serve())
    await settle()
    with uncollected():
        before = connections()
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        await soon(reach(before + 1))
        writer.write(sent)
        await asyncio.sleep(ANSWERED_SECS)
        writer.close()
        await soon(reach(before))
    listener.stop(0)
    await soon(serving)


async def reach(count: int) -> None:
    """Wait until that number of connections is in memory."""
    while connections() != count:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)


def connections() -> int:
    """The number of connections in memory."""
    return sum(type(each) is BoundedProtocol for each in gc.get_objects())


def requests() -> list[Request]:
    """The requests that are alive; other tests may have left some."""
    return [each for each in gc.get_objects() if issubclass(type(each), Request)]
