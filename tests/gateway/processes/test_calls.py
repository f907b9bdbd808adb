"""Calls through both ends of a channel: clients before one, what answers them behind the other.

Both ends are in one loop; what is between them are the frames that two processes would exchange.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import UNEXPECTED
from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import (
    ClientDisconnected,
    Metadata,
    RpcCall,
    RpcError,
    StatusCode,
    rpc_error,
)
from gateway.frontends.http.asgi_extensions import (
    HEADER_NAMES,
    JOINED_BYTES,
    SEND_PIECE,
    SEND_WHOLE,
    WATCH,
    Headers,
    Parts,
)
from gateway.processes.call import FRAME_BYTES, REPORTED_BYTES, WINDOW_BYTES
from gateway.processes.channel import Channel, Frame, headed
from gateway.processes.grpc import GrpcCall, relaying, shapes
from gateway.processes.http import EARLY_BYTES, HttpCall, HttpRelay
from gateway.processes.messages import FrontendKind, written_scope
from gateway.processes.relayed_call import RelayedCalls
from tests.builders import settle, soon

PIECE = bytes(REPORTED_BYTES - FRAME_BYTES)
FITTING = WINDOW_BYTES // REPORTED_BYTES
"""So many pieces fill the window."""

TEXT: Headers = [(b"content-type", b"text/plain")]
PATH = "/test.Service/Method"
SEND_TIMEOUT_SECS = 60.0


class Link:
    """A frontend process and the server, which hears calls as `ProcessListeners` does."""

    def __init__(self, app: ASGIApp, method: Method) -> None:
        self._app = app
        self._methods = {PATH: method}
        self._tasks: list[asyncio.Task[None]] = []
        self._strays: asyncio.Queue[Frame] = asyncio.Queue()

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        self.frontend = await self._end(ours, lambda frame: None)
        self.server = await self._end(theirs, self._hear)
        self.calls = RelayedCalls(self.frontend)
        self.app = HttpRelay(self.calls)
        self.method = relaying(shapes(self._methods), self.calls, SEND_TIMEOUT_SECS)[PATH]

    async def close(self) -> None:
        """The tasks of the server end by themselves when the frontend process is gone."""
        self.frontend.close()
        for channel in (self.frontend, self.server):
            await soon(channel.lost())
        await self.answered()
        for task in self._tasks:
            assert task.cancelled() or task.exception() is None

    async def answered(self) -> None:
        """Wait until no call is being answered."""
        if self._tasks:
            await soon(asyncio.wait(self._tasks))

    async def heard(self) -> None:
        """Wait until the server has heard all that was said to it."""
        self.frontend.send(FrontendKind.DROP_HALF)
        while (await soon(self._strays.get())).kind != FrontendKind.DROP_HALF:
            pass

    @property
    def is_idle(self) -> bool:
        """Whether no call is being answered."""
        return all(task.done() for task in self._tasks)

    async def lose_server(self) -> None:
        """As if the server's process had ended."""
        self.server.close()
        await soon(self.frontend.lost())

    async def _end(self, end: socket.socket, hear: Callable[[Frame], None]) -> Channel:
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: Channel(hear), sock=end
        )
        return channel

    def _hear(self, frame: Frame) -> None:
        if frame.kind == FrontendKind.HTTP_CALL:
            http_call = HttpCall(self.server, frame.call, frame.payload)
            self._tasks.append(asyncio.create_task(http_call.run(self._app)))
        elif frame.kind == FrontendKind.GRPC_CALL:
            grpc_call = GrpcCall(self.server, frame.call, frame.payload)
            method = self._methods[grpc_call.path]
            self._tasks.append(asyncio.create_task(grpc_call.run(method)))
        else:
            self._strays.put_nowait(frame)


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the test asks no application")


async def no_method(asked: Any, call: RpcCall) -> None:
    raise AssertionError("the test asks no method")


NO_METHOD = Method(serve=no_method, parse=bytes, serialize=bytes)


@asynccontextmanager
async def linked(app: ASGIApp = no_app, method: Method = NO_METHOD) -> AsyncIterator[Link]:
    """Inside `async with` there is a server behind a frontend process."""
    link = Link(app, method)
    await link.open()
    try:
        yield link
    finally:
        await link.close()


def request_scope(method: str = "POST", headers: Headers = ()) -> Scope:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": "/caf\xe9",
        "raw_path": b"/caf%C3%A9",
        "query_string": b"a=1",
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": None,
        "state": {HEADER_NAMES: [name.title() for name, _ in headers]},
    }


class Client:
    """A client of HTTP and its listener: the pieces are its body, whole unless `more` follows."""

    def __init__(
        self,
        app: ASGIApp,
        *pieces: bytes,
        more: bool = False,
        method: str = "POST",
        headers: Headers = (),
    ) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.offered = asyncio.Event()
        self.heads: list[tuple[int, Sequence[tuple[bytes, bytes]]]] = []
        self.is_answered = False
        self._has_left = False
        self.given = 0
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._body: asyncio.Queue[Message] = asyncio.Queue()
        self._leave: Callable[[], None] | None = None
        for index, piece in enumerate(pieces, 1):
            self.upload(piece, more=more or index < len(pieces))
        scope = request_scope(method, headers)
        scope["state"] |= {WATCH: self._watch, SEND_PIECE: self._take, SEND_WHOLE: self._take_whole}
        self._task = asyncio.ensure_future(app(scope, self._receive, self._put))

    def upload(self, piece: bytes, *, more: bool = True) -> None:
        """Send a piece of the body."""
        self._body.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def leave(self) -> None:
        """Close the connection."""
        self._has_left = True
        self._body.put_nowait({"type": "http.disconnect"})
        if self._leave is not None:
            self._leave()

    def cancel(self) -> None:
        """Have the listener give up the request."""
        self._task.cancel()

    async def piece(self) -> bytes:
        """The next piece of the answer."""
        return await soon(self._pieces.get())

    async def ended(self) -> None:
        """Wait until the frontend process is done with the request."""
        await soon(asyncio.wait([self._task]))
        self._task.result()

    async def answer(self) -> bytes:
        """The body of the answer, which is whole."""
        await self.ended()
        assert self.is_answered
        return self._taken()

    async def dropped(self) -> bytes:
        """What came of the body before the client was dropped."""
        await self.ended()
        assert not self.is_answered
        return self._taken()

    def _taken(self) -> bytes:
        return b"".join(self._pieces.get_nowait() for _ in range(self._pieces.qsize()))

    def _watch(self, leave: Callable[[], None] | None) -> None:
        self._leave = leave
        if leave is not None and self._has_left:
            leave()

    async def _receive(self) -> Message:
        message = await self._body.get()
        self.given += 1
        return message

    async def _put(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.heads.append((message["status"], message["headers"]))
            return
        assert self.heads
        assert not self.is_answered
        await self._take(message["body"])
        self.is_answered = not message.get("more_body", False)

    async def _take(self, piece: bytes) -> None:
        self.offered.set()
        await self.takes.wait()
        self._pieces.put_nowait(piece)

    async def _take_whole(self, headers: Headers, parts: Parts) -> None:
        self.heads.append((200, list(headers)))
        await self._take(b"".join(parts))
        self.is_answered = True


async def begin(send: Send, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": TEXT})


async def finish(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive) -> bytes:
    """The body to its end."""
    pieces, more = [], True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        pieces.append(message["body"])
        more = message["more_body"]
    return b"".join(pieces)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await body_of(receive)
    await begin(send)
    await finish(send, body)


async def test_an_answer_is_the_applications_status_headers_and_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send, 418)
        await finish(send, b"tea")

    async with linked(app) as link:
        client = Client(link.app, b"")
        assert await client.answer() == b"tea"
        assert client.heads == [(418, TEXT)]


async def test_a_whole_answer_is_given_to_the_listener_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"][SEND_WHOLE](TEXT, (await body_of(receive),))

    async with linked(app) as link:
        client = Client(link.app, b"asked")
        assert await client.answer() == b"asked"
        assert client.heads == [(200, TEXT)]


@pytest.mark.parametrize("size", [JOINED_BYTES, JOINED_BYTES + 1, 3 * WINDOW_BYTES])
async def test_a_whole_answer_may_be_large_and_have_many_parts(size: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts = (b"", b"x" * (size // 2), memoryview(b"y" * (size - size // 2)))
        await scope["state"][SEND_WHOLE](TEXT, parts)

    async with linked(app) as link:
        client = Client(link.app, b"")
        answer = await client.answer()
        assert (answer.count(b"x"), answer.count(b"y")) == (size // 2, size - size // 2)
        assert client.heads == [(200, TEXT)]


async def test_a_streamed_answer_comes_piece_by_piece() -> None:
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
async def test_a_body_in_pieces_comes_whole(pieces: list[bytes], announces: bool) -> None:
    headers = [(b"content-length", b"%d" % (EARLY_BYTES + 1))] if announces else []
    async with linked(echo) as link:
        client = Client(link.app, *pieces, headers=headers)
        assert await client.answer() == b"".join(pieces)


async def test_the_application_hears_of_a_large_body_before_any_of_it_has_come() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send)
        await scope["state"][SEND_PIECE](b"go on")
        await finish(send, await body_of(receive))

    async with linked(app) as link:
        client = Client(link.app, headers=[(b"content-length", b"%d" % (EARLY_BYTES + 1))])
        assert await client.piece() == b"go on"
        client.upload(b"body", more=False)
        assert await client.answer() == b"body"


async def test_an_answer_may_come_before_the_body_is_whole() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begin(send, 413)
        await finish(send, b"too much")

    async with linked(app) as link:
        client = Client(link.app, b"some", more=True)
        assert await client.answer() == b"too much"
        client = Client(link.app, b"some", more=True)
        client.upload(b"more", more=False)
        assert await client.answer() == b"too much"


async def test_a_client_that_leaves_before_its_request_has_begun_is_nobodys() -> None:
    async with linked() as link:
        client = Client(link.app)
        client.leave()
        assert await client.dropped() == b""


async def test_answers_go_to_those_who_asked() -> None:
    async with linked(echo) as link:
        clients = [Client(link.app, b"%d," % n, b"%d" % n) for n in range(20)]
        assert [await each.answer() for each in clients] == [b"%d,%d" % (n, n) for n in range(20)]


async def test_the_application_is_told_when_a_client_leaves() -> None:
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


async def test_who_watches_for_a_client_that_has_left_is_told_at_once() -> None:
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


async def test_the_application_sees_that_a_client_leaves_within_its_body() -> None:
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


async def test_a_client_that_leaves_in_the_turn_it_came_in_is_noticed() -> None:
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


async def test_a_cancelled_request_is_one_whose_client_has_left() -> None:
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


async def test_the_client_of_an_application_that_says_nothing_is_dropped() -> None:
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


async def test_a_client_without_an_answer_is_told_that_the_server_is_gone() -> None:
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


async def test_a_client_with_half_an_answer_is_dropped_when_the_server_is_gone() -> None:
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


async def test_an_answer_that_is_whole_outlives_the_server() -> None:
    async with linked(echo) as link:
        client = Client(link.app, b"asked")
        client.takes.clear()
        await soon(client.offered.wait())
        await link.answered()
        await link.lose_server()
        client.takes.set()
        assert await client.answer() == b"asked"


async def test_a_slow_client_holds_back_the_application_at_the_window() -> None:
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


async def test_an_application_that_is_held_back_goes_on_when_the_client_leaves() -> None:
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


async def test_a_slow_application_holds_back_the_client_at_the_window() -> None:
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


class Rpc(RpcCall):
    """A client of gRPC and its connection, which may be slow to take what comes."""

    def __init__(self, metadata: Metadata = (), secs: float | None = None) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.offered = asyncio.Event()
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.initial: list[Metadata] = []
        self.trailing: Metadata = ()
        self._metadata = metadata
        self._secs = secs

    @property
    def metadata(self) -> Metadata:
        return self._metadata

    @property
    def peer(self) -> str:
        return "ipv4:127.0.0.1:40000"

    def time_remaining(self) -> float | None:
        return self._secs

    async def send(self, messages: Sequence[bytes]) -> None:
        self.offered.set()
        await self.takes.wait()
        for message in messages:
            self.sent.put_nowait(message)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        assert self.sent.empty()
        self.initial.append(metadata)

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.trailing = metadata

    def on_end(self, ended: Callable[[], None]) -> None:
        raise AssertionError("a relay has nothing to do in the end")

    async def message(self) -> bytes:
        """The next message of the answer."""
        return await soon(self.sent.get())

    @property
    def untaken(self) -> list[bytes]:
        return [self.sent.get_nowait() for _ in range(self.sent.qsize())]


class Asking:
    """Messages of a client that streams, as the test sends them."""

    def __init__(self, *messages: bytes) -> None:
        self.given = 0
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        for message in messages:
            self.ask(message)

    def ask(self, message: bytes) -> None:
        self._messages.put_nowait(message)

    def half_close(self) -> None:
        self._messages.put_nowait(None)

    def __aiter__(self) -> "Asking":
        return self

    async def __anext__(self) -> bytes:
        message = await self._messages.get()
        if message is None:
            raise StopAsyncIteration
        self.given += 1
        return message


Serve = Callable[[Any, RpcCall], Awaitable[Any]]


def unary(serve: Serve) -> Method:
    return Method(serve=serve, parse=bytes, serialize=bytes)


def answering(serve: Serve) -> Method:
    """One message is answered with many."""
    return Method(serve=serve, parse=bytes, serialize=bytes, server_streams=True)


def streaming(serve: Serve) -> Method:
    """Many messages are answered with many."""
    return Method(
        serve=serve, parse=bytes, serialize=bytes, client_streams=True, server_streams=True
    )


async def only(message: bytes) -> AsyncIterator[bytes]:
    """What comes of a client that does not stream."""
    yield message


def asked_frame(message: bytes) -> bytes:
    """The payload that begins an RPC."""
    head: object = {"path": PATH, "metadata": [], "peer": "unix:", "secs": None, "whole": True}
    return headed(head, message)


async def test_a_message_is_answered_with_a_message() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        call.set_trailing_metadata([("cost", "1"), ("cost-bin", b"\xff")])
        return asked + b"!"

    async with linked(method=unary(serve)) as link:
        rpc = Rpc()
        assert await soon(link.method.answer(b"\0\xff", rpc)) == b"\0\xff!"
        assert rpc.trailing == [("cost", "1"), ("cost-bin", b"\xff")]
        assert await soon(link.method.answer(b"", Rpc())) == b"!"


async def test_an_empty_answer_is_an_answer() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        return b""

    async with linked(method=unary(serve)) as link:
        assert await soon(link.method.answer(b"asked", Rpc())) == b""


async def test_the_method_knows_of_its_client_what_the_frontend_does() -> None:
    found: list[Any] = []

    async def serve(asked: bytes, call: RpcCall) -> bytes:
        found.append((call.metadata, call.peer, call.time_remaining()))
        return b""

    metadata: Metadata = [("name", "caf\xe9 \N{SNOWMAN}"), ("trace-bin", b"\0\xff")]
    async with linked(method=unary(serve)) as link:
        await soon(link.method.answer(b"", Rpc(metadata, secs=1000.0)))
        await soon(link.method.answer(b"", Rpc()))
    assert found[0][:2] == (metadata, "ipv4:127.0.0.1:40000")
    assert 900 < found[0][2] <= 1000
    assert found[1] == ([], "ipv4:127.0.0.1:40000", None)


async def test_messages_come_one_by_one_behind_what_was_sent_before_them() -> None:
    more = asyncio.Event()

    async def serve(asked: bytes, call: RpcCall) -> None:
        await call.send_initial_metadata([("begun", "1"), ("begun-bin", b"\x80")])
        await call.send([asked, b""])
        await more.wait()
        await call.send([b"last"])

    async with linked(method=answering(serve)) as link:
        rpc = Rpc()
        running = asyncio.create_task(link.method.run(only(b"asked"), rpc))
        assert [await rpc.message(), await rpc.message()] == [b"asked", b""]
        assert rpc.initial == [[("begun", "1"), ("begun-bin", b"\x80")]]
        assert not running.done()
        more.set()
        await soon(running)
        assert rpc.untaken == [b"last"]


async def test_a_stream_goes_both_ways() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        async for message in asked:
            await call.send([message])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking()
        running = asyncio.create_task(link.method.run(asking, rpc))
        for message in (b"one", b"", b"three"):
            asking.ask(message)
            assert await rpc.message() == message
        asking.half_close()
        await soon(running)


async def test_messages_may_follow_when_the_client_has_half_closed() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        found = [message async for message in asked]
        for message in found:
            await call.send([message])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking(b"one", b"two")
        asking.half_close()
        await soon(link.method.run(asking, rpc))
        assert rpc.untaken == [b"one", b"two"]


async def test_a_method_may_end_before_its_client_has_half_closed() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        await call.send([await anext(asked)])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking(b"one", b"two")
        await soon(link.method.run(asking, rpc))
        assert rpc.untaken == [b"one"]


@pytest.mark.parametrize("shape", [unary, answering])
async def test_an_error_comes_with_its_trailing_metadata(shape: Callable[[Serve], Method]) -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        call.set_trailing_metadata([("why", "caf\xe9"), ("why-bin", b"\0\xff")])
        raise RpcError(StatusCode.DATA_LOSS, "caf\xe9 \N{SNOWMAN} is lost")

    async with linked(method=shape(serve)) as link:
        rpc = Rpc()
        with pytest.raises(RpcError) as caught:
            await soon(link.method.run(only(b""), rpc))
        assert caught.value.status is StatusCode.DATA_LOSS
        assert caught.value.details == "caf\xe9 \N{SNOWMAN} is lost"
        assert rpc.trailing == [("why", "caf\xe9"), ("why-bin", b"\0\xff")]


async def test_an_error_comes_behind_the_messages_before_it() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        await call.send([await anext(asked)])
        raise RpcError(StatusCode.ABORTED)

    async with linked(method=streaming(serve)) as link:
        rpc = Rpc()
        with pytest.raises(RpcError) as caught:
            await soon(link.method.run(Asking(b"one"), rpc))
        assert (caught.value.status, caught.value.details) == (StatusCode.ABORTED, "")
        assert rpc.untaken == [b"one"]


async def test_the_client_learns_nothing_of_a_defect_but_that_there_is_one() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        raise ValueError("a secret")

    expected = rpc_error(UNEXPECTED)
    async with linked(method=unary(serve)) as link:
        with pytest.raises(RpcError) as caught:
            await soon(link.method.answer(b"", Rpc()))
    assert (caught.value.status, caught.value.details) == (expected.status, expected.details)


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_an_rpc_that_the_server_cannot_begin_ends_with_an_error(
    shape: Callable[[Serve], Method],
) -> None:
    async def serve(asked: Any, call: RpcCall) -> Any:
        raise AssertionError("the server does not know this path")

    async with linked() as link:
        shapes_of_other = shapes({"/test.Service/Other": shape(serve)})
        [method] = relaying(shapes_of_other, link.calls, SEND_TIMEOUT_SECS).values()
        with pytest.raises(RpcError) as caught:
            await soon(method.run(Asking(b"one"), Rpc()))
    assert (caught.value.status, caught.value.details) == (StatusCode.INTERNAL, UNEXPECTED.message)


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_an_rpc_whose_method_is_cancelled_by_the_server_ends_with_an_error(
    shape: Callable[[Serve], Method],
) -> None:
    async def serve(asked: Any, call: RpcCall) -> Any:
        raise asyncio.CancelledError

    async with linked(method=shape(serve)) as link:
        with pytest.raises(RpcError) as caught:
            await soon(link.method.run(Asking(b"one"), Rpc()))
    assert (caught.value.status, caught.value.details) == (StatusCode.INTERNAL, UNEXPECTED.message)


def waiting_for(begun: asyncio.Event, stopped: asyncio.Event) -> Serve:
    """A method that goes on until it is cancelled."""

    async def serve(asked: Any, call: RpcCall) -> None:
        call.on_end(stopped.set)
        begun.set()
        await asyncio.Event().wait()

    return serve


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_a_method_is_cancelled_when_its_client_leaves(
    shape: Callable[[Serve], Method],
) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()
    async with linked(method=shape(waiting_for(begun, stopped))) as link:
        running = asyncio.create_task(link.method.run(Asking(b"one"), Rpc()))
        await soon(begun.wait())
        running.cancel()
        await soon(stopped.wait())
        await soon(asyncio.wait([running]))
        assert running.cancelled()


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_a_method_does_not_go_on_when_its_client_leaves_in_the_turn_it_came_in(
    shape: Callable[[Serve], Method],
) -> None:
    async with linked(method=shape(waiting_for(asyncio.Event(), asyncio.Event()))) as link:
        link.frontend.send(FrontendKind.GRPC_CALL, 1, asked_frame(b"one"))
        link.frontend.send(FrontendKind.GONE, 1)
        await link.heard()
        await settle()
        assert link.is_idle


async def test_details_that_are_no_unicode_do_not_keep_an_rpc_from_ending() -> None:
    begun = asyncio.Event()

    async def serve(asked: bytes, call: RpcCall) -> bytes:
        begun.set()
        raise RpcError(StatusCode.ABORTED, "no file \udcff")

    async with linked(method=unary(serve)) as link:
        running = asyncio.create_task(link.method.answer(b"", Rpc()))
        await soon(begun.wait())
        await link.answered()
        await link.lose_server()
        with pytest.raises(RpcError) as caught:
            await soon(running)
        assert caught.value.status is StatusCode.ABORTED


async def test_many_messages_are_answered_with_a_message() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> bytes:
        return b"".join([message async for message in asked])

    method = Method(serve=serve, parse=bytes, serialize=bytes, client_streams=True)
    async with linked(method=method) as link:
        rpc, asking = Rpc(), Asking(b"one", b"two")
        asking.half_close()
        await soon(link.method.run(asking, rpc))
        assert rpc.untaken == [b"onetwo"]


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_the_client_is_told_that_the_server_is_gone(
    shape: Callable[[Serve], Method],
) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()
    async with linked(method=shape(waiting_for(begun, stopped))) as link:
        running = asyncio.create_task(link.method.run(Asking(b"one"), Rpc()))
        await soon(begun.wait())
        await link.lose_server()
        for each in (running, link.method.run(Asking(b"too late"), Rpc())):
            with pytest.raises(RpcError) as caught:
                await soon(each)
            assert caught.value.status is StatusCode.UNAVAILABLE
            assert caught.value.details == "Server exiting"
        await soon(stopped.wait())


async def test_nothing_can_be_sent_to_a_client_that_has_left() -> None:
    begun = asyncio.Event()
    refused: list[str] = []

    async def serve(asked: bytes, call: RpcCall) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for send in (call.send([b"late"]), call.send_initial_metadata([])):
                with pytest.raises(ClientDisconnected):
                    await send
                refused.append("once")

    async with linked(method=answering(serve)) as link:
        running = asyncio.create_task(link.method.run(only(b"one"), Rpc()))
        await soon(begun.wait())
        running.cancel()
        await link.answered()
        await soon(asyncio.wait([running]))
    assert len(refused) == 2


async def test_the_end_is_told_behind_the_answer() -> None:
    ended: list[bool] = []

    async def serve(asked: bytes, call: RpcCall) -> bytes:
        call.on_end(lambda: ended.append(True))
        return b""

    async with linked(method=unary(serve)) as link:
        await soon(link.method.answer(b"", Rpc()))
        await link.answered()
        assert ended == [True]


async def test_a_slow_client_holds_back_the_method_at_the_window() -> None:
    sent: list[int] = []

    async def serve(asked: bytes, call: RpcCall) -> None:
        for number in range(3 * FITTING):
            sent.append(number)
            await call.send([PIECE])

    async with linked(method=answering(serve)) as link:
        rpc = Rpc()
        rpc.takes.clear()
        running = asyncio.create_task(link.method.run(only(b""), rpc))
        await soon(rpc.offered.wait())
        await settle()
        assert len(sent) == FITTING
        rpc.takes.set()
        await soon(running)
        assert rpc.untaken == [PIECE] * 3 * FITTING


async def test_a_slow_method_holds_back_the_client_at_the_window() -> None:
    begun, takes = asyncio.Event(), asyncio.Event()

    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        begun.set()
        await takes.wait()
        await call.send([b"%d" % len([message async for message in asked])])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking(*[PIECE] * 3 * FITTING)
        asking.half_close()
        running = asyncio.create_task(link.method.run(asking, rpc))
        await soon(begun.wait())
        await settle()
        assert asking.given == FITTING
        takes.set()
        await soon(running)
        assert rpc.untaken == [b"%d" % (3 * FITTING)]


async def test_rpcs_and_requests_share_a_channel() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        return b"rpc " + asked

    async with linked(echo, unary(serve)) as link:
        clients = [Client(link.app, b"%d" % n) for n in range(10)]
        rpcs: Iterable[Awaitable[bytes]] = [
            asyncio.ensure_future(link.method.answer(b"%d" % n, Rpc())) for n in range(10)
        ]
        assert await soon(asyncio.gather(*rpcs)) == [b"rpc %d" % n for n in range(10)]
        assert [await each.answer() for each in clients] == [b"%d" % n for n in range(10)]
