"""One client's connection on hyper's HTTP/2 (httpunk), and the RPCs that come over it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from httpunk import H2Server, HTTPunkError
from httpunk.asyncio import H2ServerProtocol

from gateway.descriptors import DescriptorReserve
from gateway.frontends.grpc.headers import DEADLINE, DEADLINE_PASSED, NotGrpc, require_grpc
from gateway.frontends.grpc.hyper_call import HyperCall
from gateway.frontends.grpc.hyper_events import HyperBackend, is_reset, is_whole, on_reset
from gateway.frontends.grpc.hyper_keepalive import KeepaliveServer
from gateway.frontends.grpc.hyper_limits import BufferBudget
from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import ClientDisconnected, RpcError, StatusCode
from gateway.frontends.grpc.sockets import HTTP_2
from gateway.settings import UNIX, GrpcSettings
from gateway.threads import Threads, request_threads

log = logging.getLogger("sluice.grpc")

LIMITS: Mapping[str, Any] = {
    "max_concurrent_streams": 4096,
    "initial_window_size": 4 << 20,
    "initial_connection_window_size": 1 << 30,
    "max_frame_size": 1 << 20,
    "max_header_list_size": 64 << 10,
    "max_pending_accept_reset_streams": 24,
    "max_send_buf_size": 1 << 20,
    "auto_date_header": False,
}
"""Per connection; windows, frames and buffers in bytes.

What methods do not read fills their streams' windows and, of the connection's window, as much: that
of 256 such streams, so that they do not stop the others.
"""

WRITE_BUFFER_BYTES = 1 << 20
"""What may wait for a connection's socket before nothing more is read from it."""

HELD_BYTES = 4 << 30
"""What messages that are not whole, or not taken, may hold on all connections together."""

GREETING_SECS = 20.0
"""So long may a client take for what it must send first, its preface and its settings."""

MAPPED = "::ffff:"
"""Before an IPv4 address on a socket of IPv6."""

SHOWN_CHARS = 256
"""So much of a path is repeated to who asked for it."""


Create = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(slots=True)
class HyperPort:
    """What the connections of one port have in common; the transport closes its threads."""

    methods: Mapping[str, Method]
    settings: GrpcSettings
    room: BufferBudget = field(default_factory=lambda: BufferBudget(HELD_BYTES))
    reserve: DescriptorReserve = field(default_factory=DescriptorReserve)
    threads: Threads = field(default_factory=request_threads)
    connections: "set[HyperConnection]" = field(default_factory=set)
    is_closing: bool = False


class HyperConnection(H2ServerProtocol):
    """One client's connection; each of its RPCs runs in a task that ends with the client's wish."""

    def __init__(self, shared: HyperPort) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self._socket: Any = None
        self._peer = ""
        self._bounds: Any = None
        self._rpcs: set[asyncio.Task[None]] = set()
        self._greeting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._socket = transport
        self._peer = _written(transport.get_extra_info("peername"))
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._greeting = self._loop.call_later(GREETING_SECS, self._require_greeted)
        self._shared.connections.add(self)
        super().connection_made(transport)  # type: ignore[no-untyped-call]
        # Its RPCs are waited for, also those whose client is gone already.
        serving: Any = self._serve_task
        serving.add_done_callback(lambda _: self._shared.connections.discard(self))
        refused = not _speaks_http_2(transport.get_extra_info("ssl_object"))
        if refused or self._shared.is_closing or self._shared.reserve.drops(transport):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        if self._server is not None:
            self._server.stop()
        super().connection_lost(exc)  # type: ignore[no-untyped-call]

    async def receive_some(self, max_bytes: int = 0) -> bytes:
        """Of the library's: what is to be read next; it is less than asked for, for our reasons.

        Who does not read what it is told is not read either: answers to it would pile up. Nobody
        keeps the loop for as long as there is something to read.
        """
        stream: Any = super()
        while not stream.writable_now():
            await stream.drain_future()
        if stream.readable_now():
            await asyncio.sleep(0)
        data: bytes = await stream.receive_some(self._bounds.turn_bytes)
        return data

    async def graceful_shutdown(self) -> None:
        """Of the library's: take no more RPCs; who has not even begun is not waited for."""
        self._require_greeted()
        await super().graceful_shutdown()

    def cut_off(self) -> None:
        """Drop the client."""
        self._socket.abort()
        self._cancel_rpcs()

    def _require_greeted(self) -> None:
        if self._bounds is None or not self._bounds.greeted:
            self._socket.abort()

    async def _make_server(self) -> H2Server:
        keepalive = self._shared.settings.keepalive
        server = KeepaliveServer(
            self, self._socket, keepalive, backend=HyperBackend(self._loop), **LIMITS
        )
        self._bounds = server.connection
        self._bounds.bound(self._shared.room, self._begin)
        if self._conn_lost:
            server.stop()
        return server

    async def _serve(self) -> None:
        """Of the library's: the connection's whole life; RPCs begin where they come in."""
        self._server = await self._make_server()
        await self._maybe_apply_graceful()  # type: ignore[no-untyped-call]
        async with self._server as server:
            await server.accept()  # at the end
            if self._bounds.is_failed():
                self._cancel_rpcs()
            while self._rpcs:
                await asyncio.wait(self._rpcs)

    def _cancel_rpcs(self) -> None:
        for task in self._rpcs:
            task.cancel()

    def _begin(self, request: Any) -> None:
        if is_reset(request):
            return
        create: Create = self._loop.create_task
        if self._is_quick(request):
            task = self._begin_eagerly(request, create)
        else:
            task = create(self.handle(request))
        if task is not None:
            self._rpcs.add(task)
            task.add_done_callback(self._rpcs.discard)
            on_reset(request, task.cancel)

    def _begin_eagerly(self, request: Any, create: Create) -> "asyncio.Task[None] | None":
        try:
            return start_eagerly(self.handle(request), create)
        except (Exception, asyncio.CancelledError):
            # Around one request in a frontend: it runs where all of the connection's are read.
            log.exception("request failed unexpectedly")
            return create(request.reset())

    def _is_quick(self, request: Any) -> bool:
        """Whether it is likely to be answered without waiting; a deadline needs a task."""
        method = self._shared.methods.get(request.path)
        quick = method is not None and method.eager and is_whole(request)
        return quick and request.headers.get(DEADLINE) is None

    async def handle(self, request: Any) -> None:
        """One RPC, until it is answered or its client is gone."""
        call = HyperCall(request, self._peer, self._shared.room, self._loop, self._shared.threads)
        try:
            await self._serve_rpc(request, call)
        except (ClientDisconnected, HTTPunkError):
            await request.reset()  # if it is not over
        except Exception:
            # Around one request in a frontend: its stream ends, and the others go on.
            log.exception("request failed unexpectedly")
            await request.reset()
        finally:
            call.end()

    async def _serve_rpc(self, request: Any, call: HyperCall) -> None:
        try:
            require_grpc(request)
            method = self._shared.methods.get(request.path)
            if method is None:
                shown = request.path[:SHOWN_CHARS]
                raise RpcError(StatusCode.UNIMPLEMENTED, f"no method '{shown}' is served here")
            if method.compresses:
                call.compress(self._shared.settings.compression)
            await call.run(method)
        except NotGrpc as error:
            await call.refuse(error.http_status, error)
        except RpcError as error:
            await call.fail(error)
        except TimeoutError:
            await call.fail(RpcError(StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED))


def _speaks_http_2(session: Any) -> bool:
    """Whether the client of a TLS session has agreed to it, as gRPC demands; who has none does."""
    return session is None or session.selected_alpn_protocol() == HTTP_2


def _written(name: Any) -> str:
    """An address as gRPC writes it."""
    if not isinstance(name, tuple):
        return UNIX
    host, port = name[0].removeprefix(MAPPED), name[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def start_eagerly(
    coroutine: Coroutine[Any, Any, None], create: Create
) -> "asyncio.Task[None] | None":
    """Run a coroutine up to its first wait; `create` makes the task for what is left, if any is.

    Up to there the current task is the caller's: nothing in it may ask which that is, as timeouts
    and task groups do. What it raises before its first wait is raised here.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return create(_Rest(coroutine, awaited))


class _Rest(Coroutine[Any, Any, None]):
    """What is left of a coroutine that waits already."""

    __slots__ = ("_awaited", "_coroutine", "_told")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._told = False

    def send(self, value: None) -> Any:
        if self._told:
            return self._coroutine.send(value)
        self._told = True
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *error: Any) -> Any:
        self._told, self._awaited = True, None
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("what is left of a coroutine is run by a task")
