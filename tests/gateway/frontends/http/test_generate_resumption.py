"""Resumption over HTTP: events with ids, Last-Event-ID, idempotency keys."""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.app import build_app
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings, ResumptionSettings
from tests.builders import (
    DECOUPLED,
    FLAG,
    TEXT,
    Execution,
    LoadedModels,
    ScriptedInstance,
    settle,
    soon,
    text_response,
)
from tests.conftest import Serve
from tests.exchange import Exchange

LLM = replace(TEXT, name="llm", model_transaction_policy=DECOUPLED)
SETTINGS = HttpSettings(max_input_size=1000, first_response_secs=60.0, keep_alive_secs=60.0)
STREAM = "/v2/models/llm/generate_stream"
WORDS = ["a", "b", "c", "d"]
UNKNOWN = b'{"error":"there is no such stream to continue here: it has expired, or it was asked '
EVENT = re.compile(rb'id: ([\w-]+)\.(\d+)\ndata: \{.*?"text_output":"(\w*)"\}\n\n')


class Door:
    """An application with the models `llm`, which is decoupled, and `text`."""

    def __init__(self, serve: Serve, **settings: float) -> None:
        self.llm, self.text = ScriptedInstance(), ScriptedInstance()
        models = LoadedModels(serve(self.llm, config=LLM), serve(self.text))
        self.recordings = Recordings(ResumptionSettings(**settings))  # type: ignore[arg-type]
        self.app: ASGIApp = build_app(
            DataPlane(models),  # type: ignore[arg-type]
            SETTINGS,
            "triton",
            recordings=self.recordings,
        )

    def ask(
        self,
        path: str = STREAM,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        **members: Any,
    ) -> Exchange:
        """A request with one text, and more members."""
        body = orjson.dumps({"text_input": "hi", **members})
        return Exchange(self.app, path, body, headers, method)

    def back(self, event: str, path: str = STREAM, method: str = "GET") -> Exchange:
        """A client that has lost its connection behind an event."""
        return Exchange(self.app, path, b"", {"last-event-id": event}, method)


@pytest.fixture
async def door(serve: Serve) -> AsyncIterator[Door]:
    """Recordings that wait for long."""
    found = Door(serve, grace_secs=60.0)
    yield found
    found.recordings.drain()
    assert found.recordings.reading().recordings == 0


def say(execution: Execution, *words: str) -> None:
    for word in words:
        execution.answer(text_response(word))


def events(body: bytes) -> list[tuple[str, int, str]]:
    """Token, number and text of each event; nothing else may be in the body."""
    found = EVENT.findall(body)
    assert EVENT.sub(b"", body) == b""
    return [(token.decode(), int(number), text.decode()) for token, number, text in found]


async def refusal(exchange: Exchange) -> tuple[int, bytes]:
    async with exchange:
        status, _ = await exchange.start()
        return status, await exchange.rest()


async def test_the_events_of_a_resumable_stream_have_ids(door: Door) -> None:
    async with door.ask(resumable=True) as exchange:
        execution = await door.llm.begun()
        assert "resumable" not in execution.requests[0].parameters
        say(execution, "a")
        status, headers = await exchange.start()
        token = headers["sluice-stream"]
        assert status == 200
        assert len(token) == 32
        execution.finish("b")
        assert events(await exchange.rest()) == [(token, 1, "a"), (token, 2, "b")]


@pytest.mark.parametrize("members", [{}, {"resumable": False}])
async def test_other_streams_have_none_and_stop_at_once(
    door: Door, members: dict[str, Any]
) -> None:
    async with door.ask(**members) as exchange:
        execution = await door.llm.begun()
        say(execution, "a")
        assert "sluice-stream" not in (await exchange.start())[1]
        assert (await exchange.chunk()).startswith(b"data: ")
        exchange.leave()
        await soon(execution.stopped.wait())
    assert door.recordings.reading().recordings == 0


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("got", range(len(WORDS) + 1))
async def test_wherever_the_connection_is_cut_nothing_is_lost_or_repeated(
    door: Door, got: int, method: str
) -> None:
    body = b""
    async with door.ask(resumable=True) as exchange:
        execution = await door.llm.begun()
        say(execution, WORDS[0])
        token = (await exchange.start())[1]["sluice-stream"]
        for word in WORDS[1 : got + 1]:
            body += await exchange.chunk()
            say(execution, word)
        if got == len(WORDS):
            body += await exchange.chunk()
    say(execution, *WORDS[got + 1 :])
    execution.finish("end")
    async with door.back(f"{token}.{got}", method=method) as again:
        status, headers = await again.start()
        assert (status, headers["sluice-stream"]) == (200, token)
        body += await again.rest()
    whole = [*WORDS, "end"]
    assert events(body) == [(token, number, text) for number, text in enumerate(whole, 1)]
    assert len(door.llm.executions) == 1
    assert door.recordings.reading().resumed == 1


async def test_a_resumed_stream_continues_with_later_responses(door: Door) -> None:
    async with door.ask(resumable=True) as exchange:
        execution = await door.llm.begun()
        say(execution, "a")
        token = (await exchange.start())[1]["sluice-stream"]
        async with door.back(f"{token}.1") as again:
            say(execution, "b")
            await again.start()
            assert events(await again.chunk()) == [(token, 2, "b")]
            execution.finish("c")
            assert events(await again.rest()) == [(token, 3, "c")]
        assert events(await exchange.rest())[-1] == (token, 3, "c")


@pytest.mark.parametrize("flag", [False, True])
async def test_a_client_that_has_every_event_gets_204(door: Door, flag: bool) -> None:
    async with door.ask(resumable=True) as exchange:
        execution = await door.llm.begun()
        execution.answer(text_response("a", final=not flag))
        if flag:
            execution.answer(FLAG)
        token = (await exchange.start())[1]["sluice-stream"]
        assert events(await exchange.rest()) == [(token, 1, "a")]
    async with door.back(f"{token}.1") as again:
        assert (await again.start())[0] == 204
        assert await again.rest() == b""


async def test_a_stream_without_a_response_is_no_reason_to_stay_away(door: Door) -> None:
    async with door.ask(resumable=True) as exchange:
        (await door.llm.begun()).answer(FLAG)
        assert (await exchange.start())[0] == 200
        assert await exchange.rest() == b""


async def test_the_error_of_a_stream_has_no_id_and_is_repeated(door: Door) -> None:
    async with door.ask(resumable=True) as exchange:
        execution = await door.llm.begun()
        say(execution, "a")
        token = (await exchange.start())[1]["sluice-stream"]
        execution.answer(InferenceError(Code.INTERNAL, "broken"))
        assert (await exchange.rest()).endswith(b'\n\ndata: {"error":"broken"}\n\n')
    assert await refusal(door.back(f"{token}.1")) == (500, b'data: {"error":"broken"}\n\n')
    async with door.back(f"{token}.0") as again:
        assert (await again.start())[0] == 200
        assert (await again.rest()).endswith(b'\n\ndata: {"error":"broken"}\n\n')


@pytest.mark.parametrize("event", ["nonsense", "x.1", "é.1", "." * 500])
async def test_an_id_that_is_not_ours_is_not_found(door: Door, event: str) -> None:
    status, body = await refusal(door.back(event))
    assert status == 404
    assert body.startswith(UNKNOWN)


@pytest.mark.parametrize(
    "path",
    ["/v2/models/text/generate_stream", "/v2/models/llm/versions/1/generate_stream"],
)
async def test_a_stream_of_another_path_is_not_found(door: Door, path: str) -> None:
    async with door.ask(resumable=True) as exchange:
        execution = await door.llm.begun()
        say(execution, "a")
        token = (await exchange.start())[1]["sluice-stream"]
        status, body = await refusal(door.back(f"{token}.0", path))
        assert (status, body) == await refusal(door.back("x.0"))
        assert status == 404
        assert await refusal(door.back(f"{token}.2")) == (
            400,
            b'{"error":"response 2 of this stream has not been sent yet, the newest is 1"}',
        )
        execution.finish("end")
        assert events(await exchange.rest())[-1] == (token, 2, "end")


async def test_an_expired_stream_is_not_found(serve: Serve) -> None:
    door = Door(serve, grace_secs=0.01)
    async with door.ask(resumable=True) as exchange:
        execution = await door.llm.begun()
        say(execution, "a")
        token = (await exchange.start())[1]["sluice-stream"]
    await soon(execution.stopped.wait())
    assert (await refusal(door.back(f"{token}.1")))[0] == 404
    assert door.recordings.reading().expired == 1


@pytest.mark.parametrize(("method", "event"), [("GET", ""), ("PUT", "x.1"), ("HEAD", "x.1")])
async def test_other_methods_ask_for_nothing(door: Door, method: str, event: str) -> None:
    status, body = await refusal(door.back(event, method=method))
    assert (status, body) == (405, b'{"error":"Method Not Allowed"}')


async def test_an_empty_last_event_id_is_none(door: Door) -> None:
    async with door.ask(headers={"last-event-id": ""}) as exchange:
        (await door.llm.begun()).finish("end")
        assert (await exchange.start())[0] == 200


async def test_the_body_of_a_resuming_request_has_a_limit(door: Door) -> None:
    exchange = Exchange(door.app, STREAM, b"x" * 1001, {"last-event-id": "x.1"})
    assert (await refusal(exchange))[0] == 400


@pytest.mark.parametrize("wish", ["yes", 1])
async def test_a_wish_that_is_no_truth_value_is_refused(door: Door, wish: Any) -> None:
    status, body = await refusal(door.ask(resumable=wish))
    assert status == 400
    assert b"parameter 'resumable' is" in body


async def test_generate_cannot_be_resumed(door: Door) -> None:
    status, body = await refusal(door.ask("/v2/models/text/generate", resumable=True))
    assert status == 400
    assert b"Idempotency-Key" in body


# Idempotency keys.

KEY = {"idempotency-key": "a key"}


async def test_a_stream_with_a_known_key_is_joined_from_its_start(door: Door) -> None:
    async with door.ask(headers=KEY) as first:
        execution = await door.llm.begun()
        say(execution, "a")
        _, headers = await first.start()
        assert "idempotency-replayed" not in headers
        async with door.ask(headers=KEY) as second:
            _, again = await second.start()
            assert again["idempotency-replayed"] == "true"
            assert again["sluice-stream"] == headers["sluice-stream"]
            execution.finish("b")
            assert await second.rest() == await first.rest()
    assert len(door.llm.executions) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/text/generate", b'{"text_input":"hi"}'),
        (
            "/v2/models/text/infer",
            b'{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["hi"]}]}',
        ),
    ],
)
async def test_a_lost_answer_is_replayed_with_its_key(door: Door, path: str, body: bytes) -> None:
    async with Exchange(door.app, path, body, KEY):
        execution = await door.text.begun()
    assert not execution.stopped.is_set()
    async with Exchange(door.app, path, body, KEY) as running:
        await settle()
        execution.finish("once")
        status, headers = await running.start()
        assert (status, headers["idempotency-replayed"]) == (200, "true")
        found = await running.rest()
        assert b'"once"' in found
    async with Exchange(door.app, path, body, KEY) as late:
        _, headers = await late.start()
        assert headers["idempotency-replayed"] == "true"
        assert await late.rest() == found
    assert len(door.text.executions) == 1
    assert (await refusal(Exchange(door.app, path, body + b" ", KEY)))[0] == 422


async def test_without_a_key_an_answer_that_was_lost_is_lost(door: Door) -> None:
    async with door.ask("/v2/models/text/generate"):
        execution = await door.text.begun()
    await soon(execution.stopped.wait())


async def test_a_key_with_another_body_or_route_is_refused(door: Door) -> None:
    async with door.ask(headers=KEY):
        await door.llm.begun()
        for other in (
            door.ask(headers=KEY, temperature=1),
            door.ask("/v2/models/text/generate", headers=KEY),
            door.ask("/v2/models/llm/versions/1/generate_stream", headers=KEY),
        ):
            status, body = await refusal(other)
            assert status == 422
            assert b"Idempotency-Key has been used for a request to another route" in body
    assert len(door.llm.executions) == 1
    assert door.text.executions == []


@pytest.mark.parametrize("path", [STREAM, "/v2/models/text/generate", "/v2/models/text/infer"])
@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_key_that_is_none_is_refused(door: Door, path: str, key: str) -> None:
    body = b'{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["x"]}]}'
    if not path.endswith("infer"):
        body = b'{"text_input":"hi"}'
    status, found = await refusal(Exchange(door.app, path, body, {"idempotency-key": key}))
    assert (status, b"expected 1 to 255" in found) == (400, True)


async def test_a_request_that_is_refused_does_not_use_up_its_key(door: Door) -> None:
    status, _ = await refusal(door.ask(headers=KEY, text_input=[1, 2]))
    assert status == 400
    async with door.ask(headers=KEY) as exchange:
        (await door.llm.begun()).finish("end")
        assert "idempotency-replayed" not in (await exchange.start())[1]
