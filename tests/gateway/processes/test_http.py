"""HTTP requests through both ends of a channel: answers, bodies and windows."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from gateway.frontends.http.request_scope import (
    HEADER_NAMES,
    JOINED_BYTES,
    SEND_PIECE,
    SEND_WHOLE,
)
from gateway.processes.windows import WINDOW_BYTES
from tests.builders import settle, soon
from tests.gateway.processes.http_clients import Client, begin, body_of, echo, finish, request_scope
from tests.gateway.processes.links import FITTING, PIECE, TEXT, linked


async def test_an_answer_is_the_applications_status_headers_and_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send, 418)
        await finish(send, b"tea")

    async with linked(app) as link:
        client = Client(link.app, b"")
        assert await client.answer() == b"tea"
        assert client.heads == [(418, TEXT)]


async def test_a_complete_answer_is_passed_on_in_one_call() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"][SEND_WHOLE](TEXT, (await body_of(receive),))

    async with linked(app) as link:
        client = Client(link.app, b"asked")
        assert await client.answer() == b"asked"
        assert client.heads == [(200, TEXT)]


@pytest.mark.parametrize("size", [JOINED_BYTES, JOINED_BYTES + 1, 3 * WINDOW_BYTES])
async def test_a_complete_answer_may_be_large_and_have_many_parts(size: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts = (b"", b"x" * (size // 2), memoryview(b"y" * (size - size // 2)))
        await scope["state"][SEND_WHOLE](TEXT, parts)

    async with linked(app) as link:
        client = Client(link.app, b"")
        answer = await client.answer()
        assert (answer.count(b"x"), answer.count(b"y")) == (size // 2, size - size // 2)
        assert client.heads == [(200, TEXT)]


async def test_a_streamed_answer_arrives_piece_by_piece() -> None:
    more = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send)
        await scope["state"][SEND_PIECE](b"one")
        await more.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await finish(send)

    async with linked(app) as link:
        client = Client(link.app, b"")
        assert await client.piece() == b"one"
        assert not client.is_answered
        more.set()
        assert await client.piece() == b"two"
        assert await client.answer() == b""


async def test_the_application_sees_the_request_that_the_listener_saw() -> None:
    found: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope)
        await echo(scope, receive, send)

    headers = [(b"x-name", b"caf\xe9")]
    async with linked(app) as link:
        await Client(link.app, b"", method="PUT", headers=headers).answer()
    asked = {**request_scope("PUT", headers), "state": None}
    assert asked.items() <= {**found[0], "state": None}.items()
    assert found[0]["state"][HEADER_NAMES] == [b"X-Name"]


async def test_an_answer_to_head_has_no_body() -> None:
    async with linked(echo) as link:
        client = Client(link.app, b"asked", method="HEAD")
        assert await client.answer() == b""
        assert client.heads == [(200, TEXT)]


@pytest.mark.parametrize("pieces", [[b"", b""], [b"a", b"b", b""], [b"x" * 50_000] * 60])
@pytest.mark.parametrize("announces", [True, False])
async def test_a_body_in_pieces_arrives_complete(pieces: list[bytes], announces: bool) -> None:
    headers = [(b"content-length", b"%d" % (HIGH_WATER_LIMIT + 1))] if announces else []
    async with linked(echo) as link:
        client = Client(link.app, *pieces, headers=headers)
        assert await client.answer() == b"".join(pieces)


@pytest.mark.parametrize(
    "header",
    [
        (b"content-length", b"%d" % (HIGH_WATER_LIMIT + 1)),
        (b"transfer-encoding", b"chunked"),
        (b"expect", b"100-continue"),
    ],
)
async def test_the_application_starts_before_a_late_body_arrives(
    header: tuple[bytes, bytes],
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send)
        await scope["state"][SEND_PIECE](b"go on")
        await finish(send, await body_of(receive))

    async with linked(app) as link:
        client = Client(link.app, headers=[header])
        assert await client.piece() == b"go on"
        client.upload(b"body", more=False)
        assert await client.answer() == b"body"


async def test_an_answer_may_precede_the_end_of_the_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send, 413)
        await finish(send, b"too much")

    async with linked(app) as link:
        client = Client(link.app, b"some", more=True)
        assert await client.answer() == b"too much"
        client = Client(link.app, b"some", more=True)
        client.upload(b"more", more=False)
        assert await client.answer() == b"too much"


async def test_a_slow_client_blocks_the_application_at_the_window() -> None:
    sent: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send)
        for number in range(3 * FITTING):
            sent.append(number)
            await scope["state"][SEND_PIECE](PIECE)
        await finish(send)

    async with linked(app) as link:
        client = Client(link.app, b"")
        client.takes.clear()
        await soon(client.offered.wait())
        await settle()
        assert len(sent) == FITTING
        client.takes.set()
        assert await client.answer() == PIECE * 3 * FITTING
    assert len(sent) == 3 * FITTING


async def test_a_disconnect_releases_a_blocked_application() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send)
        for _ in range(3 * FITTING):
            await scope["state"][SEND_PIECE](PIECE)
        await finish(send)

    async with linked(app) as link:
        client = Client(link.app, b"")
        client.takes.clear()
        await soon(client.offered.wait())
        client.leave()
        await link.answered()
        client.takes.set()
        await client.dropped()


async def test_a_slow_application_blocks_the_client_at_the_window() -> None:
    begun, takes = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b""
        assert (await receive())["body"] == PIECE
        begun.set()
        await takes.wait()
        await echo(scope, receive, send)

    pieces = [PIECE] * 3 * FITTING
    headers = [(b"content-length", b"%d" % (len(PIECE) * len(pieces)))]
    async with linked(app) as link:
        client = Client(link.app, *pieces, headers=headers)
        await soon(begun.wait())
        await settle()
        assert client.given == FITTING + 1
        takes.set()
        assert await client.answer() == b"".join(pieces[1:])
