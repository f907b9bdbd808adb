"""The forms of receipts over HTTP: the wishes for one, and its place in an answer."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.app import build_app
from gateway.frontends.http.request_scope import SEND_WHOLE, TRACES
from gateway.frontends.http.timing import timed, with_timing
from gateway.messages import InferRequest, InferResponse
from gateway.observability.receipt import Receipt
from gateway.observability.receipts import Receipts
from tests.builders import (
    DECOUPLED,
    FLAG,
    TEXT,
    LoadedModels,
    ScriptedInstance,
    soon,
    text_response,
)
from tests.conftest import Serve
from tests.gateway.frontends.http.apps import SETTINGS
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import CHAT, body, chunk

GENERATE = "/v2/models/text/generate_stream"
CHATS = "/v1/chat/completions"
WISH = {"x-want-timing": "1"}
DONE = "data: [DONE]"


class Asked:
    """A server with the models `text` and `chat`, which answer as the test says."""

    def __init__(self, serve: Serve, connect: Open, *, every: bool) -> None:
        self._instances = ScriptedInstance(None), ScriptedInstance(None)
        text, chat = self._instances
        models = LoadedModels(
            serve(text, config=replace(TEXT, model_transaction_policy=DECOUPLED)),
            serve(chat, config=CHAT),
        )
        dataplane = DataPlane(models, receipts=Receipts(every=every))  # type: ignore[arg-type]
        self._client: httpx.AsyncClient = connect(build_app(dataplane, SETTINGS, "triton"))
        self.named = ""
        """The id in the head of the latest answer."""

    async def ask(
        self,
        path: str,
        members: dict[str, Any],
        *answers: InferResponse | InferenceError,
        headers: Any = None,
    ) -> list[str]:
        """The events of a stream."""
        instance = self._instances[path == CHATS]
        sent = self._client.post(path, content=body(**members), headers=headers)
        waiting = asyncio.ensure_future(sent)
        execution = await instance.begun()
        for answer in answers:
            execution.answer(answer)
        execution.end()
        found = await soon(waiting)
        self.named = found.headers.get("x-request-id", "")
        return [each for each in found.text.split("\n\n") if each]

    async def why(self, request_id: str) -> Any:
        """The answer of `/admin/why/{id}`."""
        found = await soon(self._client.get(f"http://localhost/admin/why/{request_id}"))
        return found.json()


ASK = {"text_input": "hi"}
ASK_CHAT = {"model": "chat", "stream": True}
WISHES: list[tuple[dict[str, Any], Any]] = [
    ({"timing": True}, None),
    ({}, WISH),
]
OF_OPENAI = [*WISHES, ({"nvext": {"extra_fields": ["worker_id", "timing"]}}, None)]
NO_WISHES: list[tuple[dict[str, Any], Any]] = [
    ({}, {"x-want-timing": "0"}),
    ({"nvext": {"extra_fields": "timing"}}, None),
    ({"nvext": ["timing"], "timing": 1}, None),
]


@pytest.fixture
async def asked(serve: Serve, connect: Open) -> Asked:
    return Asked(serve, connect, every=False)


@pytest.fixture
async def always(serve: Serve, connect: Open) -> Asked:
    """With the option `--server-timing`."""
    return Asked(serve, connect, every=True)


def timing_of(event: str) -> Any:
    return json.loads(event.removeprefix("data: "))["timing"]


@pytest.mark.parametrize(("members", "headers"), WISHES)
async def test_the_last_event_of_generate_stream_has_it(
    asked: Asked, members: dict[str, Any], headers: Any
) -> None:
    answers = text_response("a"), text_response("b", final=True)
    first, last = await asked.ask(GENERATE, {**ASK, **members}, *answers, headers=headers)
    assert "timing" not in first
    assert timing_of(last)["total"] > 0
    assert json.loads(last.removeprefix("data: "))["text_output"] == "b"


async def test_an_event_of_its_own_follows_an_empty_final_response(asked: Asked) -> None:
    first, last = await asked.ask(GENERATE, {**ASK, "timing": True}, text_response("a"), FLAG)
    assert "timing" not in first
    assert json.loads(last.removeprefix("data: ")).keys() == {
        *("model_name", "model_version", "timing"),
    }


@pytest.mark.parametrize(("members", "headers"), OF_OPENAI)
async def test_the_last_chunk_of_openai_has_it(
    asked: Asked, members: dict[str, Any], headers: Any
) -> None:
    answers = chunk('{"id":1}'), chunk('{"usage":{}}', final=True)
    found = await asked.ask(CHATS, {**ASK_CHAT, **members}, *answers, headers=headers)
    assert found[0] == 'data: {"id":1}'
    assert found[1].startswith('data: {"usage":{},"timing":{"recv":')
    assert found[2:] == [DONE]


async def test_a_chunk_without_choices_follows_an_empty_final_response(asked: Asked) -> None:
    found = await asked.ask(CHATS, ASK_CHAT, chunk('{"id":1}'), FLAG, headers=WISH)
    assert found[1].startswith('data: {"choices":[],"timing":{"recv":')
    assert [found[0], *found[2:]] == ['data: {"id":1}', DONE]


@pytest.mark.parametrize("headers", [WISH, WISH | {"x-request-id": "mine"}])
async def test_the_account_of_openai_is_that_of_the_id_in_its_answer(
    asked: Asked, headers: Any
) -> None:
    await asked.ask(CHATS, ASK_CHAT, chunk("{}", final=True), headers=headers)
    found = await asked.why(asked.named)
    assert (found["id"], found["status"]) == (headers.get("x-request-id", asked.named), "ok")


async def test_without_an_account_the_error_says_which_requests_have_one(asked: Asked) -> None:
    await asked.ask(GENERATE, ASK, text_response("a", final=True), headers=WISH)
    found = await asked.why("none")
    for each in ("'none'", "with an id", "x-want-timing: 1", "--server-timing=true"):
        assert each in found["error"]


@pytest.mark.parametrize(("members", "headers"), NO_WISHES)
async def test_without_a_wish_there_is_none(
    asked: Asked, members: dict[str, Any], headers: Any
) -> None:
    found = await asked.ask(
        CHATS, {**ASK_CHAT, **members}, chunk("{}", final=True), headers=headers
    )
    assert found == ["data: {}", DONE]


async def test_with_the_option_a_comment_has_it(always: Asked) -> None:
    comment = ": server-timing recv;dur="
    found = await always.ask(CHATS, ASK_CHAT, chunk("{}", final=True))
    assert [found[0], found[2]] == ["data: {}", DONE]
    assert found[1].startswith(comment)
    event, last = await always.ask(GENERATE, ASK, text_response("a", final=True))
    assert "timing" not in event
    assert last.startswith(comment)


async def test_behind_an_error_a_comment_has_it(asked: Asked) -> None:
    error = InferenceError(Code.INTERNAL, "broken")
    answers = text_response("a"), error
    *_, failed, last = await asked.ask(GENERATE, ASK, *answers, headers=WISH)
    assert failed == 'data: {"error":"broken"}'
    assert last.startswith(": server-timing recv;dur=")


@pytest.mark.parametrize("json_text", [b"{}", b"[1]", b"{ }", b"1", b""])
def test_json_without_members_is_unchanged(json_text: bytes) -> None:
    receipt = Receipt(0, 0)
    assert with_timing(json_text, receipt) == json_text
    assert not receipt.told


async def test_a_whole_answer_is_one_write_with_the_parts_up_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[tuple[dict[bytes, bytes], bytes]] = []

    async def send_whole(headers: Any, parts: Any) -> None:
        written.append((dict(headers), b"".join(parts)))

    receipt = Receipt(0, 0)
    receipt.refused(InferRequest(model="m"), InferenceError(Code.UNAVAILABLE, "full"))
    answer = timed(Response(b"whole"), receipt)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 10**9)
    await answer({"type": "http", "state": {SEND_WHOLE: send_whole}}, unused, unused)
    ((headers, body),) = written
    assert body == b"whole"
    assert headers[b"content-length"] == b"5"
    assert headers[b"server-timing"].endswith(b"total;dur=1000.0")
    assert receipt.sent_ns == 10**9


async def unused(*_: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    "scope", [{"state": {}}, {"state": {SEND_WHOLE: unused}, TRACES: []}], ids=["page", "traced"]
)
async def test_an_answer_with_a_head_of_its_own_has_the_parts_up_to_the_head(
    scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sent = [10**9], []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    receipt = Receipt(0, 0)
    receipt.refused(InferRequest(model="m"), InferenceError(Code.UNAVAILABLE, "full"))

    async def send(message: Any) -> None:
        now[0] += 10**9
        sent.append(message)

    await timed(Response(b"whole"), receipt)({"type": "http", **scope}, unused, send)
    head, answer = sent
    assert dict(head["headers"])[b"server-timing"].endswith(b"total;dur=1000.0")
    assert answer["body"] == b"whole"
    assert receipt.sent_ns == 3 * 10**9
