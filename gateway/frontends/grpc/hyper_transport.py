"""Transport `hyper`: gRPC on hyper's HTTP/2 (httpunk), its port, its connections and their RPCs."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from httpunk import H2Server, HTTPunkError
from httpunk.asyncio import H2ServerProtocol

from gateway.client_limits import ConnectionLimits
from gateway.frontends.grpc.http2_wire import DEADLINE_PASSED, NotGrpc, require_grpc
from gateway.frontends.grpc.hyper_begun import BegunCalls
from gateway.frontends.grpc.hyper_call import HyperBackend, HyperCall, is_reset
from gateway.frontends.grpc.hyper_ends import in_turns
from gateway.frontends.grpc.hyper_heads import KEPT_BYTES, LargeRequest
from gateway.frontends.grpc.hyper_limits import BufferBudget, KeepaliveServer
from gateway.frontends.grpc.rpc import ClientDisconnected, Method, Transport
from gateway.frontends.grpc.sockets import bound, peer_name, speaks_http_2
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.policy.certificates import identity_of
from gateway.settings import GrpcSettings
from gateway.threads import Threads, request_threads
from gateway.tls.certificates import Certificates
from gateway.tls.connection import TlsPort
from gateway.unix_socket import SocketFile, unix_path

BACKLOG = 4096
"""Connections waiting to be accepted; the clients of further ones retry after a second."""

log = logging.getLogger("sluice.grpc")

LIMITS: Mapping[str, Any] = {
    "max_concurrent_streams": 4096,
    "initial_window_size": 4 << 20,
    "initial_connection_window_size": 1 << 30,
    "max_frame_size": 1 << 20,
    "max_header_list_size": KEPT_BYTES,
    "max_pending_accept_reset_streams": 24,
    "max_send_buf_size": 1 << 20,
    "auto_date_header": False,
}
"""Limits per connection; windows, frames and buffers in bytes.

Data that a method does not read fills the window of its stream and of the connection. The window
of the connection is that of 256 streams, so a few unread streams do not block the others.
"""

WRITE_BUFFER_BYTES = 1 << 20
"""Unsent output of a connection above which reading stops."""

BUFFERED_BYTES = 4 << 30
"""Maximum of incomplete and unsent messages of all connections together."""

GREETING_SECS = 20.0
"""Timeout for the preface and the settings of a client."""

SHOWN_CHARS = 256
"""Longest part of the path shown in the error."""


class HyperTransport(Transport):
    """Server of gRPC connections at one address; raises OSError if binding fails.

    An already `listening` socket may be given; the path of a given Unix socket is not removed.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        settings: GrpcSettings,
        listening: socket.socket | None = None,
    ) -> None:
        limits = ConnectionLimits(settings.connections_per_address)
        self.certificates = Certificates(settings.tls) if settings.tls else None
        self._tls = TlsPort(self.certificates, limits) if self.certificates else None
        self._shared = HyperPort(methods, settings, ConnectionLimits(0) if self._tls else limits)
        self._socket = listening or bound(settings)
        path = unix_path(settings.address)
        self._is_unix = bool(path)
        self._path = SocketFile(path) if path and listening is None else None
        self._server: asyncio.Server | None = None
        self._stopped = asyncio.Event()
        self.port: int = 0 if path else self._socket.getsockname()[1]

    async def start(self) -> None:
        loop: Any = asyncio.get_running_loop()
        create = loop.create_unix_server if self._is_unix else loop.create_server
        self._server = await create(self._connect, sock=self._socket, backlog=BACKLOG)

    async def stop(self) -> None:
        self._shared.is_closing = True
        if self._tls is not None:
            self._tls.stop()
        self._socket.close() if self._server is None else self._server.close()
        if self._path is not None:
            self._path.remove()
        try:
            while remaining := tuple(self._shared.connections):
                ends = [each.graceful_shutdown() for each in remaining]
                await asyncio.gather(*ends, return_exceptions=True)
                await asyncio.gather(*(each.wait_closed() for each in remaining))
                self._shared.connections.difference_update(remaining)
        finally:
            self._stopped.set()

    async def cut_off(self, grace_secs: float) -> None:
        try:
            async with asyncio.timeout(grace_secs):
                await self._stopped.wait()
        except TimeoutError:
            for each in tuple(self._shared.connections):
                each.cut_off()
            await self._stopped.wait()
        finally:
            self._shared.threads.close()

    def _connect(self) -> asyncio.Protocol:
        create = partial(HyperConnection, self._shared)
        return create() if self._tls is None else self._tls.accept(create)


@dataclass(slots=True)
class HyperPort:
    """State shared by the connections of one port; the transport closes the threads."""

    methods: Mapping[str, Method]
    settings: GrpcSettings
    limits: ConnectionLimits
    budget: BufferBudget = field(default_factory=lambda: BufferBudget(BUFFERED_BYTES))
    threads: Threads = field(default_factory=request_threads)
    connections: "set[HyperConnection]" = field(default_factory=set)
    is_closing: bool = False


class HyperConnection(H2ServerProtocol):
    """One connection; a reset of a stream cancels the task of its RPC."""

    def __init__(self, shared: HyperPort) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = shared
        self._socket: Any = None
        self.peer = ""
        self.certificate: str | None = None
        self._bounds: Any = None
        self._begun = BegunCalls(self, shared.settings.compression)
        self._rpcs: set[asyncio.Task[None]] = set()
        self._greeting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._socket = transport
        settings, session = self._shared.settings, transport.get_extra_info("ssl_object")
        self.peer = peer_name(transport.get_extra_info("peername"), settings.address)
        if settings.tls is not None and settings.tls.mutual:
            self.certificate = identity_of(session)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._greeting = self._loop.call_later(GREETING_SECS, self._require_greeted)
        self._shared.connections.add(self)
        super().connection_made(transport)  # type: ignore[no-untyped-call]
        # The connection is kept until its RPCs have ended, also after a disconnect.
        serving: Any = self._serve_task
        serving.add_done_callback(lambda _: self._shared.connections.discard(self))
        refused = not speaks_http_2(session)
        if refused or self._shared.is_closing or self._shared.limits.drops(transport):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        self._shared.limits.ended(self._socket)
        if self._server is not None:
            self._server.stop()
        super().connection_lost(exc)  # type: ignore[no-untyped-call]

    def data_received(self, data: bytes) -> None:
        """Override of httpunk: pass bytes to the task that waits for them, or keep them."""
        waiter: PromptWaiter | None = self._read_waiter
        if waiter is None or waiter.done() or len(data) > self._bounds.turn_bytes:
            super().data_received(data)  # type: ignore[no-untyped-call]
        else:
            waiter.set_result(data)

    async def receive_some(self, max_bytes: int = 0) -> bytes:
        """Override of httpunk: read at most `turn_bytes`.

        Reading blocks while WRITE_BUFFER_BYTES of output are unsent, and yields to the other
        connections before each further read.
        """
        stream: Any = super()
        while self._writing_paused:
            await stream.drain_future()
        if self._buffered or self._eof:
            await asyncio.sleep(0)
        else:
            self._read_waiter = PromptWaiter(self._loop)
            try:
                received = await self._read_waiter
            finally:
                self._read_waiter = None
            if received is not None:
                return received
        data: bytes = await stream.receive_some(self._bounds.turn_bytes)
        return data

    def send_together(self, send: Callable[[], None]) -> None:
        """Call a function that sends frames, and write them at once."""
        self._bounds.send_together(send)

    @property
    def may_write(self) -> bool:
        """Whether the client reads what is sent, as far as is known."""
        return not (self._writing_paused or self._conn_lost or self._socket.is_closing())

    def write(self, data: memoryview) -> None:
        """Write at once."""
        self._socket.write(data)

    async def graceful_shutdown(self) -> None:
        """Override of httpunk: refuse new RPCs; drop a client without a preface."""
        self._require_greeted()
        await super().graceful_shutdown()

    def cut_off(self) -> None:
        """Drop the connection."""
        self._socket.abort()
        self._cancel_rpcs()

    def _require_greeted(self) -> None:
        if self._bounds is None or not self._bounds.greeted:
            self._socket.abort()

    async def _make_server(self) -> H2Server:
        backend, keepalive = HyperBackend(self._loop), self._shared.settings.keepalive
        server = KeepaliveServer(self, self._socket, keepalive, backend=backend, **LIMITS)
        self._bounds = server.connection
        self._bounds.bound(self._shared.budget, self._begin)
        if self._conn_lost:
            server.stop()
        return server

    async def _serve(self) -> None:
        """Override of httpunk: the life of the connection; RPCs start where they are received."""
        self._server = await self._make_server()
        await self._maybe_apply_graceful()  # type: ignore[no-untyped-call]
        async with self._server as server:
            await server.accept()  # returns when the connection ends
            if self._bounds.is_failed():
                self._cancel_rpcs()
            while self._rpcs or self._begun:
                await self._begun.ended()
                if self._rpcs:
                    await asyncio.wait(self._rpcs)

    def _cancel_rpcs(self) -> None:
        self._begun.cancel()
        in_turns(iter([task.cancel for task in self._rpcs]))

    def _begin(self, request: Any) -> None:
        if is_reset(request):
            return
        is_large = isinstance(request, LargeRequest)
        method = None if is_large else self._shared.methods.get(request.path)
        if method is None or not self._begun.begin(request, method):
            self.start(request, self._loop.create_task(self.handle(request)))

    def start(self, request: Any, task: asyncio.Task[None]) -> None:
        """Own the task of an RPC; a reset cancels it."""
        self._rpcs.add(task)
        task.add_done_callback(self._rpcs.discard)
        request._stream.reset_evt.listen(task.cancel)

    def new_call(self, request: Any) -> HyperCall:
        """The call of a request."""
        shared = self._shared
        return HyperCall(request, self, shared.budget, self._loop, shared.threads)

    async def handle(self, request: Any) -> None:
        """Serve one RPC until it is answered or its client disconnects."""
        call = self.new_call(request)
        await self.until_end(request, call, self._serve_rpc(request, call))

    async def until_end(self, request: Any, call: HyperCall, serving: Awaitable[None]) -> None:
        """Serve one RPC, send its error if it has one, and end its call."""
        try:
            await self._answered(call, serving)
        except (ClientDisconnected, HTTPunkError):
            await request.reset()  # no-op for an ended stream
        except asyncio.CancelledError as error:
            # Its traceback has frames that refer to it: a cycle with all objects of the RPC.
            error.with_traceback(None)
            if not is_reset(request):
                raise
        except Exception:
            # Around one request in a frontend: its stream is reset, the others continue.
            log.exception("request failed unexpectedly")
            await request.reset()
        finally:
            call.end()

    async def _serve_rpc(self, request: Any, call: HyperCall) -> None:
        require_grpc(request)
        method = self._shared.methods.get(request.path)
        if method is None:
            shown = request.path[:SHOWN_CHARS]
            raise RpcError(StatusCode.UNIMPLEMENTED, f"no method '{shown}' is served here")
        if method.guard is not None:
            method.guard(call)  # before the message is read
        if method.compresses:
            call.compress(self._shared.settings.compression)
        await call.run(method)

    async def _answered(self, call: HyperCall, serving: Awaitable[None]) -> None:
        try:
            await serving
        except NotGrpc as error:
            await call.refuse(error.http_status, error)
        except RpcError as error:
            await call.fail(error)
        except TimeoutError:
            await call.fail(RpcError(StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED))


class PromptWaiter:
    """A future with one waiting task, which continues in the call of `set_result`.

    The result is received bytes, or None if others have to be looked at first. The task continues
    in the next turn of the event loop if that call is made by a task, or before the task waits.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_cancelled",
        "_context",
        "_loop",
        "_received",
        "_set",
        "_wake",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False  # how asyncio recognizes a future
        self._loop = loop
        self._set = self._cancelled = False
        self._wake: Callable[[PromptWaiter], object] | None = None
        self._context: Context | None = None
        self._received: bytes | None = None

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the task."""
        return self._loop

    def done(self) -> bool:
        """Whether it is set or cancelled."""
        return self._set or self._cancelled

    def set_result(self, result: bytes | None) -> None:
        """Wake the task."""
        self._set = True
        self._received = result
        wake, self._wake = self._wake, None
        if wake is None or self._context is None:
            return
        if asyncio.current_task(self._loop) is None:
            self._context.run(wake, self)
        else:
            self._loop.call_soon(wake, self, context=self._context)

    def cancel(self, msg: object = None) -> bool:
        """Cancel the wait; False if it is over."""
        if self.done():
            return False
        self._cancelled = True
        wake, self._wake = self._wake, None
        if wake is not None:
            self._loop.call_soon(wake, self, context=self._context)
        return True

    def result(self) -> bytes | None:
        """The outcome for the task; CancelledError after `cancel`."""
        if self._cancelled:
            raise asyncio.CancelledError
        return self._received

    def add_done_callback(self, wake: Callable[[Any], object], *, context: Context) -> None:
        """For the task: continue by this call."""
        if self._set or self._cancelled:
            self._loop.call_soon(wake, self, context=context)
        else:
            self._wake, self._context = wake, context

    def __await__(self) -> Generator["PromptWaiter", None, bytes | None]:
        if not (self._set or self._cancelled):
            self._asyncio_future_blocking = True
            yield self
        return self.result()
