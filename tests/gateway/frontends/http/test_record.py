"""`POST /v2/models/{model}/record`: lines of golden requests, which end with their client."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp

from backends.identity import Behaviour, IdentityInstance
from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.frontends.http import record
from gateway.frontends.http.app import build_app
from gateway.models.model import Model
from tests.builders import LoadedModels, read_all, settle, soon, text_request
from tests.conftest import Serve
from tests.exchange import Exchange
from tests.gateway.frontends.http.apps import SETTINGS

PATH = "/v2/models/text/record"


class Recorded:
    """A server that allows recordings, and its only model."""

    def __init__(self, model: Model, *, allow_record: bool = True) -> None:
        self.model = model
        models: Any = LoadedModels(model)
        self.dataplane = DataPlane(models)
        settings = replace(SETTINGS, allow_record=allow_record)
        self.app: ASGIApp = build_app(self.dataplane, settings, "triton")

    def record(self, path: str = PATH, **members: Any) -> Exchange:
        return Exchange(self.app, path, orjson.dumps(members) if members else b"")

    async def infer(self, text: str) -> None:
        """A request of another client."""
        with self.dataplane.infer(text_request(text)) as stream:
            assert await soon(read_all(stream)) == [text]


@pytest.fixture
async def server(serve: Serve) -> Recorded:
    return Recorded(serve(IdentityInstance(Behaviour(), {"text_input": "text_output"})))


async def next_line(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await exchange.chunk())
    return found


async def test_lines_come_as_requests_come_and_the_last_one_has_the_reason_of_the_end(
    server: Recorded,
) -> None:
    async with server.record(count=2) as exchange:
        status, headers = await exchange.start()
        assert (status, headers["content-type"]) == (200, "application/x-ndjson")
        assert await next_line(exchange) == {"recorded": 0, "dropped": {}}
        for text in ("one", "two"):
            await server.infer(text)
            found = await next_line(exchange)
            assert found["golden"]["expect"] == {"text": {"equals": text}}
        assert await next_line(exchange) == {
            "recorded": 2,
            "dropped": {},
            "end": "all are recorded",
        }
        await exchange.ended()
    assert server.model.statistics.success.count == 2


async def test_the_counts_come_in_silence(
    server: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "COUNTS_SECS", 0.001)
    async with server.record() as exchange:
        await exchange.start()
        for _ in range(3):
            assert await next_line(exchange) == {"recorded": 0, "dropped": {}}


async def test_a_client_may_disconnect_at_every_step(server: Recorded) -> None:
    """Until a disconnect comes later than the end of the recording."""
    is_over = False
    steps = 0
    while not is_over:
        async with server.record(count=1) as exchange:
            asking = asyncio.create_task(server.infer(f"text {steps}"))
            for _ in range(steps):
                await asyncio.sleep(0)
            steps += 1
            is_over = exchange.ended_by_itself
        await soon(asking)
        assert server.model.recorder is None
        await soon(server.model.requests.drained())
    assert steps > 5


async def test_a_silent_recording_ends_with_its_client(server: Recorded) -> None:
    async with server.record() as exchange:
        await exchange.start()
        await settle()
        assert server.model.recorder is not None
        exchange.leave()
        await exchange.ended()
    assert server.model.recorder is None


async def test_a_recording_ends_when_the_server_drains(server: Recorded) -> None:
    async with server.record() as exchange:
        await exchange.start()
        await exchange.chunk()
        server.dataplane.refuse_requests()
        assert (await next_line(exchange))["end"] == "the server exits"
        await exchange.ended()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"count": 0}, "count: is 0, expected a number from 1 to 1000"),
        ({"count": 1001}, "count: is 1001, expected a number from 1 to 1000"),
        ({"count": 1.5}, "count: is 1.5, expected a whole number"),
        ({"secs": 3601}, "secs: is 3601, expected a number from 0.1 to 3600"),
        ({"redact": "("}, 'redact: is "(", expected a regular expression'),
        ({"redact": "x" * 1001}, "redact: has 1001 characters, expected at most 1000"),
        ({"redact": "x" * (16 << 10)}, "the body has more than 16384 bytes"),
        ({"other": 1}, "other: is no member, expected one of count, secs, redact"),
    ],
    ids=["zero", "many", "part", "long", "pattern", "long pattern", "long body", "unknown"],
)
async def test_limits_are_read_strictly(
    server: Recorded, members: dict[str, Any], message: str
) -> None:
    async with server.record(**members) as exchange:
        status, _ = await exchange.start()
        body = json.loads(await exchange.rest())
    assert status == 400
    assert body["error"].startswith(message)
    assert server.model.recorder is None


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v2/models/other/record", 404), ("/v2/models/text/versions/2/record", 404)],
    ids=["model", "version"],
)
async def test_an_unknown_model_is_not_found(server: Recorded, path: str, status: int) -> None:
    async with server.record(path) as exchange:
        assert (await exchange.start())[0] == status


async def test_a_server_records_only_if_it_allows_it_and_reads_no_body_before(
    serve: Serve,
) -> None:
    model = serve(IdentityInstance(Behaviour(), {"text_input": "text_output"}))
    refusing = Recorded(model, allow_record=False)
    async with refusing.record(redact="(") as exchange:
        assert (await exchange.start())[0] == 501
        assert b"--allow-record=true" in await exchange.rest()
    assert model.recorder is None


async def test_a_pattern_is_compiled_in_a_thread(
    server: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(pattern: str) -> None:
        compiled.append((pattern, threading.current_thread() is threading.main_thread()))

    compiled: list[tuple[str, bool]] = []
    monkeypatch.setattr(record, "re", SimpleNamespace(compile=compile_, error=re.error))
    async with server.record(redact="secret") as exchange:
        assert (await exchange.start())[0] == 200
    assert compiled == [("secret", False)]


async def test_a_server_that_exits_begins_no_recording(server: Recorded) -> None:
    server.dataplane.refuse_requests()
    async with server.record() as exchange:
        assert (await exchange.start())[0] == 503
    with pytest.raises(InferenceError):
        server.dataplane.infer(text_request())
