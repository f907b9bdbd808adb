"""Requests over HTTP as the logs note them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import Code, InferenceError
from gateway.frontends.http.access import LoggedApp
from gateway.frontends.http.errors import refused
from gateway.frontends.http.request_scope import SEND_PIECE, SEND_WHOLE, WATCH, WRITE_PIECE
from gateway.observability.access_log import AccessLog
from gateway.observability.request_context import LoggedRequest, current_request


class Notes(AccessLog):
    """An access log that keeps what has ended."""

    def __init__(self) -> None:
        super().__init__(None)
        self.found: list[LoggedRequest] = []

    def ended(self, request: LoggedRequest) -> None:
        self.found.append(request)


class Client:
    """A connection: its scope, and the pieces that it gets."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.on_disconnect: Callable[[], object] | None = None
        state = {
            SEND_WHOLE: self.send_whole,
            SEND_PIECE: self.send_piece,
            WRITE_PIECE: lambda piece: len(piece) > 1,
            WATCH: self.watch,
        }
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/v2/models/a/infer",
            "headers": [(b"content-length", b"12")],
            "client": ("10.0.0.1", 4000),
            "state": state,
        }

    async def send(self, message: Message) -> None:
        self.pieces.append(message)

    async def send_whole(self, headers: Any, parts: Any) -> None:
        self.pieces += parts

    async def send_piece(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def watch(self, on_disconnect: Callable[[], object] | None) -> None:
        self.on_disconnect = on_disconnect


class App:
    """An application that does as the function says."""

    def __init__(self, act: Callable[[Scope, Send], Any]) -> None:
        self._act = act

    def begin(self, cycle: Any, start: Any) -> bool:
        self._act(cycle.scope, cycle.send)
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._act(scope, send)


async def served(act: Callable[[Scope, Send], Any], times: int = 1) -> list[LoggedRequest]:
    """The requests of a client whose connection repeats its scope."""
    notes, client = Notes(), Client()
    app = LoggedApp(App(act), notes)
    for _ in range(times):
        await app(client.scope, asyncio.Queue[Message]().get, client.send)
    return notes.found


async def test_an_answer_by_the_connection_counts_once_also_on_a_repeated_scope() -> None:
    async def act(scope: Scope, send: Send) -> None:
        await scope["state"][SEND_WHOLE]([], [b"123", b"45"])
        await scope["state"][SEND_PIECE](b"6")
        assert scope["state"][WRITE_PIECE](b"78")
        assert not scope["state"][WRITE_PIECE](b"9")

    for found in await served(act, times=3):
        assert (found.status, found.bytes_in, found.bytes_out) == (200, 12, 8)
        assert (found.route, found.peer) == ("/v2/models/{model}/infer", "10.0.0.1")


async def test_a_refusal_has_its_code() -> None:
    async def act(scope: Scope, send: Send) -> None:
        answer = refused("/v2", InferenceError(Code.UNSUPPORTED, "no"))
        await answer(scope, asyncio.Queue[Message]().get, send)

    (found,) = await served(act)
    assert (found.status, found.code) == (501, "UNSUPPORTED")


async def test_a_failed_request_has_the_status_of_its_answer() -> None:
    async def act(scope: Scope, send: Send) -> None:
        raise RuntimeError

    notes, client = Notes(), Client()
    with pytest.raises(RuntimeError):
        await LoggedApp(App(act), notes)(client.scope, asyncio.Queue[Message]().get, client.send)
    assert [each.status for each in notes.found] == [500]


@pytest.mark.parametrize(("status", "noted"), [(None, 499), (400, 499), (200, 200)])
async def test_a_client_that_disconnects_before_its_answer_has_a_status_of_its_own(
    status: int | None, noted: int
) -> None:
    notes, client = Notes(), Client()

    async def act(scope: Scope, send: Send) -> None:
        gone: list[bool] = []
        scope["state"][WATCH](lambda: gone.append(True))
        assert client.on_disconnect is not None
        client.on_disconnect()
        assert gone == [True]
        scope["state"][WATCH](None)
        assert client.on_disconnect is None
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": []})

    await LoggedApp(App(act), notes)(client.scope, asyncio.Queue[Message]().get, client.send)
    assert [each.status for each in notes.found] == [noted]


async def test_lines_of_a_request_without_a_task_are_about_it() -> None:
    notes, client = Notes(), Client()
    noted: list[LoggedRequest | None] = []
    app = LoggedApp(App(lambda scope, send: noted.append(current_request())), notes)
    assert app.begin(client, None)  # type: ignore[arg-type]
    assert [each.route for each in noted if each is not None] == ["/v2/models/{model}/infer"]
    assert current_request() is None
    assert notes.found == []
