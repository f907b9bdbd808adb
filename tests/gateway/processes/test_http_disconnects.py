"""HTTP requests through both ends of a channel: disconnects, failures, a dead server."""

import asyncio
import logging

import orjson
import pytest
from starlette.types import Receive, Scope, Send

from gateway.frontends.http.request_scope import SEND_PIECE, SEND_WHOLE, WATCH
from gateway.processes.channel import headed
from gateway.processes.messages import FrontendKind, written_scope
from tests.builders import settle, soon
from tests.gateway.processes.http_clients import Client, begin, body_of, echo, finish, request_scope
from tests.gateway.processes.links import TEXT, linked


async def test_a_disconnect_before_the_request_starts_no_call() -> None:
    async with linked() as link:
        client = Client(link.app)
        client.leave()
        assert await client.dropped() == b""


async def test_concurrent_requests_get_their_own_answers() -> None:
    async with linked(echo) as link:
        clients = [Client(link.app, b"%d," % n, b"%d" % n) for n in range(20)]
        assert [await each.answer() for each in clients] == [b"%d,%d" % (n, n) for n in range(20)]


async def test_a_disconnect_reaches_the_application() -> None:
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][WATCH](left.set)
        await begin(send)
        await scope["state"][SEND_PIECE](b"one")
        await left.wait()
        await scope["state"][SEND_PIECE](b"two")
        await finish(send, b"three")

    async with linked(app) as link:
        client = Client(link.app, b"")
        await client.piece()
        client.leave()
        assert await client.dropped() == b""
        await soon(left.wait())
        await link.answered()


async def test_a_watch_set_after_a_disconnect_is_called_immediately() -> None:
    left: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        assert (await receive())["type"] == "http.disconnect"
        scope["state"][WATCH](lambda: left.append(True))

    async with linked(app) as link:
        client = Client(link.app, b"asked")
        await settle()
        client.leave()
        await client.dropped()
        await link.answered()
    assert left == [True]


async def test_a_disconnect_within_the_body_reaches_the_application() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] == "http.request":
            pass
        left.set()

    async with linked(app) as link:
        client = Client(link.app, b"some", more=True)
        await soon(begun.wait())
        client.leave()
        await soon(left.wait())
        await client.dropped()


async def test_a_disconnect_in_the_turn_of_the_request_is_noticed() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        seen.append((await receive())["type"])

    async with linked(app) as link:
        asked = headed(written_scope(request_scope(), whole=True), b"body")
        link.frontend.send(FrontendKind.HTTP_CALL, 1, asked)
        link.frontend.send(FrontendKind.GONE, 1)
        await link.heard()
    assert seen == ["http.disconnect"]


async def test_cancelling_the_relay_disconnects_the_application() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][WATCH](left.set)
        begun.set()
        await left.wait()

    async with linked(app) as link:
        client = Client(link.app, b"some", more=True)
        await soon(begun.wait())
        client.cancel()
        await soon(left.wait())


@pytest.mark.parametrize("pieces", [0, 1])
async def test_the_client_of_an_application_that_raises_is_dropped(
    pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(pieces):
            await begin(send)
            await scope["state"][SEND_PIECE](b"one")
        raise ValueError("a defect")

    async with linked(app) as link:
        client = Client(link.app, b"")
        assert await client.dropped() == b"one" * pieces
        assert len(client.heads) == pieces
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


async def test_the_client_of_an_application_without_an_answer_is_dropped() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send)

    async with linked(app) as link:
        client = Client(link.app, b"some", more=True)
        assert await client.dropped() == b""


async def test_a_request_that_the_server_cannot_read_is_aborted() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"][SEND_WHOLE](TEXT, (b"fine",))

    async with linked(app) as link:
        with link.calls.new() as call:
            call.begin(FrontendKind.HTTP_CALL, {"no": "scope"}, b"")
            assert [frame.kind for frame in await soon(call.frames())] == [FrontendKind.ABORT]
        assert await Client(link.app, b"").answer() == b"fine"


async def test_a_request_without_an_answer_gets_503_when_the_server_disconnects() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][WATCH](left.set)
        begun.set()
        await left.wait()

    async with linked(app) as link:
        clients = [Client(link.app, b""), Client(link.app, b"some", more=True)]
        await soon(begun.wait())
        await link.lose_server()
        for client in [*clients, Client(link.app, b"too late"), Client(link.app, b"", more=True)]:
            assert orjson.loads(await client.answer()) == {"error": "Server exiting"}
            assert [status for status, _ in client.heads] == [503]
        await soon(left.wait())


async def test_an_incomplete_answer_is_dropped_when_the_server_disconnects() -> None:
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][WATCH](left.set)
        await begin(send)
        await scope["state"][SEND_PIECE](b"half")
        await left.wait()

    async with linked(app) as link:
        client = Client(link.app, b"")
        assert await client.piece() == b"half"
        await link.lose_server()
        assert await client.dropped() == b""
        assert [status for status, _ in client.heads] == [200]


async def test_a_complete_answer_is_sent_after_a_disconnect_of_the_server() -> None:
    async with linked(echo) as link:
        client = Client(link.app, b"asked")
        client.takes.clear()
        await soon(client.offered.wait())
        await link.answered()
        await link.lose_server()
        client.takes.set()
        assert await client.answer() == b"asked"
