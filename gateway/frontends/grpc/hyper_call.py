"""One RPC on hyper's HTTP/2: messages, metadata and status on one stream, and its events.

Events and queues of asyncio cost more than the rest of httpunk for a small RPC. The shortcuts use
private names of httpunk: its release is pinned, and tests fail if they change.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from httpunk import HeaderMap, HTTPunkError
from httpunk._backend.asyncio import AsyncioBackend

from gateway.client_limits import late_text, pace_due
from gateway.frontends.grpc.http2_wire import (
    ACCEPTED,
    DEADLINE,
    ENCODING,
    IDENTITY,
    Deframer,
    authority_of,
    compressed_in_thread,
    encoding_for,
    framed,
    read_metadata,
    timeout_secs,
    written_details,
    written_metadata,
)
from gateway.frontends.grpc.hyper_limits import BufferBudget, BufferShare
from gateway.frontends.grpc.hyper_writes import send_at_once
from gateway.frontends.grpc.response import MAX_MESSAGE_BYTES
from gateway.frontends.grpc.rpc import ClientDisconnected, Method, RpcCall
from gateway.frontends.grpc.status import Metadata, RpcError, StatusCode
from gateway.settings import CompressionLevel
from gateway.threads import Threads

HTTP_OK = 200

BEGINNING = (("content-type", "application/grpc"), ("grpc-accept-encoding", ACCEPTED))
STATUS = "grpc-status"
DETAILS = "grpc-message"
BEGUN = HeaderMap(BEGINNING)
"""Headers of an answer without metadata."""

MESSAGE_IDLE_SECS = 60.0
"""Longest pause of the message of a unary RPC, as of a body of HTTP."""

SMALL_BYTES = 64 << 10
"""Answers up to this size do not count towards the budget, so they are always sent."""


class Client(Protocol):
    """The client of a connection, as `RpcHead` has it."""

    peer: str
    certificate: str | None


class HyperCall(RpcCall):
    """RPC of httpunk; reading or sending after a reset raises HTTPunkError."""

    __slots__ = (
        "_deadline",
        "_encoding",
        "_ended",
        "_incoming",
        "_loop",
        "_outgoing",
        "_owner",
        "_request",
        "_stream",
        "_threads",
        "_trailing",
    )

    def __init__(
        self,
        request: Any,
        owner: Client,
        budget: BufferBudget,
        loop: asyncio.AbstractEventLoop,
        threads: Threads,
    ) -> None:
        super().__init__()
        self.begun_ns = time.perf_counter_ns()
        self._request, self._threads = request, threads
        self._incoming, self._outgoing = BufferShare(budget), BufferShare(budget)
        self._owner = owner
        self._loop = loop
        self._deadline: float | None = None
        self._stream: Any = None
        self._trailing: Metadata = ()
        self._encoding = IDENTITY
        self._ended: Callable[[], None] | None = None

    @property
    def metadata(self) -> Metadata:
        return read_metadata(self._request.headers.raw_items())

    @property
    def peer(self) -> str:
        return self._owner.peer

    @property
    def certificate(self) -> str | None:
        return self._owner.certificate

    @property
    def authority(self) -> str:
        return authority_of(self._request)

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._loop.time()

    async def send(self, messages: Sequence[bytes]) -> None:
        if self._stream is None:
            await self.send_initial_metadata(())
        if self._encoding == IDENTITY:
            body = framed(messages)
        else:
            body = (await compressed_in_thread(messages, self._encoding, self._threads),)
        self._count_unsent(body)
        try:
            for piece in body:
                await self._stream.send_data(piece)
        except HTTPunkError as error:
            raise ClientDisconnected from error
        finally:
            self._outgoing.clear()

    def write(self, messages: Sequence[bytes]) -> bool:
        return self._encoding == IDENTITY and send_at_once(self._request, messages)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        headers = BEGUN
        if metadata or self._encoding != IDENTITY:
            coded = () if self._encoding == IDENTITY else ((ENCODING, self._encoding),)
            headers = HeaderMap([*BEGINNING, *coded, *written_metadata(metadata)])
        try:
            self._stream = await self._request.send_response(HTTP_OK, headers=headers)
        except HTTPunkError as error:
            raise ClientDisconnected from error

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def on_end(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def end(self) -> None:
        """Release the buffers and call the function of `on_end`."""
        self._incoming.clear()
        self._outgoing.clear()
        if self._ended is not None:
            self._ended()

    def compress(self, level: CompressionLevel) -> None:
        """Compress the answers if the client accepts it; call before sending."""
        if level is not CompressionLevel.NONE:
            accepted = self._request.headers.get("grpc-accept-encoding") or b""
            self._encoding = encoding_for(level, accepted.decode("latin-1"))

    async def run(self, method: Method) -> None:
        """Answer the RPC by a method.

        Raises RpcError if it fails, TimeoutError after the client's deadline.
        """
        allowed = self._request.headers.get(DEADLINE)
        if allowed is None:
            await self._run(method)
            return
        self._deadline = self._loop.time() + timeout_secs(allowed)
        async with asyncio.timeout_at(self._deadline):
            await self._run(method)

    async def _run(self, method: Method) -> None:
        if method.unary:
            await self.answer(await method.answer(await self._only(), self))
            return
        await method.run(self._messages(), self)
        await self._finish(StatusCode.OK)

    async def fail(self, error: RpcError) -> None:
        """End the RPC with an error; the rest of a partly sent message is dropped."""
        await error.due()
        self._trailing = (*self._trailing, *error.trailers)
        await self._finish(error.status, error.details)

    async def refuse(self, http_status: int, error: RpcError) -> None:
        """Answer a request that is not gRPC; call before sending."""
        headers = HeaderMap([*BEGINNING, *self._trailers(error.status, error.details)])
        await self._request.respond(http_status, headers=headers)

    async def answer(self, message: bytes) -> None:
        """End a unary RPC with its message. RpcError if a large one exceeds the budget."""
        await self.send((message,))
        await self._finish(StatusCode.OK)

    async def _finish(self, status: StatusCode, details: str = "") -> None:
        trailers = self._trailers(status, details)
        if self._stream is None:
            headers = HeaderMap([*BEGINNING, *trailers])
            await self._request.respond(HTTP_OK, headers=headers)
        else:
            await self._stream.send_trailers(HeaderMap(trailers))

    def _trailers(self, status: StatusCode, details: str) -> list[tuple[str, str]]:
        found = [(STATUS, str(int(status))), *written_metadata(self._trailing)]
        return [*found, (DETAILS, written_details(details))] if details else found

    async def _only(self) -> bytes:
        deframer = self._deframer()
        if is_whole(self._request):
            messages = await self._fed(deframer, whole_body(self._request))
            deframer.end()
        else:
            messages = await self._first_two(deframer)
        if len(messages) != 1:
            found = "more than one message" if messages else "no message"
            raise RpcError(StatusCode.UNIMPLEMENTED, f"the client sent {found}, expected one")
        return messages[0]

    async def _first_two(self, deframer: Deframer) -> Sequence[bytes]:
        """The messages of the client; at most those up to the second one.

        RpcError DEADLINE_EXCEEDED if it sends nothing for a while, or too little.
        """
        messages: list[bytes] = []
        began, size = self._loop.time(), 0
        try:
            async with asyncio.timeout(MESSAGE_IDLE_SECS) as late:
                async for chunk in self._request.aiter_bytes():
                    late.reschedule(None)
                    size += len(chunk)
                    messages += await self._fed(deframer, chunk)
                    if len(messages) > 1:
                        return messages
                    idle_at = self._loop.time() + MESSAGE_IDLE_SECS
                    late.reschedule(min(idle_at, pace_due(began, size, MESSAGE_IDLE_SECS)))
        except TimeoutError:
            text = late_text("message", MESSAGE_IDLE_SECS)
            raise RpcError(StatusCode.DEADLINE_EXCEEDED, text) from None
        deframer.end()
        return messages

    async def _messages(self) -> AsyncIterator[bytes]:
        deframer = self._deframer()
        try:
            async for chunk in self._request.aiter_bytes():
                found = await self._fed(deframer, chunk)
                for message in found:
                    yield message
                message, found = b"", ()  # the next one may be hours away
        except HTTPunkError:
            return  # the client has disconnected, and the method is about to be cancelled
        deframer.end()

    def _deframer(self) -> Deframer:
        encoding = self._request.headers.get(ENCODING)
        found = IDENTITY if encoding is None else encoding.decode("latin-1")
        return Deframer(found, MAX_MESSAGE_BYTES)

    async def _fed(self, deframer: Deframer, chunk: bytes) -> Sequence[bytes]:
        """The messages completed by a chunk; slow decompression runs in a thread."""
        if deframer.quick(chunk):
            found = deframer.feed(chunk)
        else:
            found = await self._threads.run(deframer.feed, chunk)
        if not found:
            self._incoming.add(len(chunk))
        elif deframer.encoding == IDENTITY:
            self._incoming.clear()
        else:
            # Counted until the next messages, because they may be a thousand times the sent bytes.
            self._incoming.change(sum(map(len, found)))
        return found

    def _count_unsent(self, body: Sequence[bytes]) -> None:
        size = sum(map(len, body))
        if size > SMALL_BYTES:
            self._outgoing.change(size)


class HyperEvent:
    """An event with at most one waiting task and one listener."""

    __slots__ = ("_listener", "_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], object] | None = None

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._set

    def set(self) -> None:
        """Set the event, wake the waiter and call the listener."""
        if not self._set:
            self._set = True
            waiter = self._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            if self._listener is not None:
                self._listener()

    def clear(self) -> None:
        """Reset the event."""
        self._set = False

    async def wait(self) -> None:
        """Wait until the event is set."""
        while not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def hold(self) -> None:
        """Set the event until `clear`, without a wake-up and a call."""
        self._set = True

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Call a function when the event is set, immediately if it is; None ends that."""
        self._listener = listener
        if self._set and listener is not None:
            listener()


class HyperQueue:
    """An unbounded queue with one reader; both ends in one object, as httpunk requires.

    `items` are those behind the ones that the reader has begun with: two lists, because an empty
    deque takes 760 bytes.
    """

    __slots__ = ("_loop", "_next", "_waiter", "items")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.items: list[Any] = []
        self._next: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None

    def send(self, item: Any) -> None:
        """Append an item."""
        self.items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def receive(self) -> Any:
        """Remove and return the first item; wait for one."""
        if not self._next:
            while not self.items:
                self._waiter = self._loop.create_future()
                await self._waiter
            self._next, self.items = self.items, self._next
            self._next.reverse()
        return self._next.pop()


class HyperBackend(AsyncioBackend):
    """httpunk's backend for asyncio, with these events and queues."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event: Any = HyperEvent
        self._loop = loop

    def queue(self) -> tuple[HyperQueue, HyperQueue]:
        mailbox = HyperQueue(self._loop)
        return mailbox, mailbox


def is_whole(request: Any) -> bool:
    """Whether the whole body of a request has been received, in one piece."""
    items = request._stream.body_recv.items
    return len(items) == 2 and items[1] is None and type(items[0]) is tuple


def whole_body(request: Any) -> bytes:
    """The body of a request that `is_whole`; it is removed."""
    chunk, is_budgeted = request._stream.body_recv.items.pop(0)
    connection, stream_id, size = request._conn, request._stream.id, len(chunk)
    if is_budgeted:
        connection.release_data_frame(stream_id, size)
    flags = connection.release_capacity(stream_id, size)
    if flags:
        connection._after(flags)
    found: bytes = chunk
    return found


def is_reset(request: Any) -> bool:
    """Whether the client has reset a request."""
    found: bool = request._stream.reset_evt.is_set()
    return found
