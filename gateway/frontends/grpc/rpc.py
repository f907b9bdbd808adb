"""RPCs: calls, methods, status codes and errors; the interface of transports."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Protocol, Self

from google.protobuf.message import DecodeError

from gateway.errors import InferenceError, unexpected
from gateway.frontends.grpc.refusals import WANTS_LIMITS
from gateway.frontends.grpc.status import Metadata, RpcError, StatusCode, rpc_error
from gateway.messages import Deadline
from gateway.observability.receipt import HEADER, WISHED
from gateway.policy.caller import Caller
from gateway.threads import LARGE_BYTES
from gateway.tls.certificates import Certificates

log = logging.getLogger("sluice.grpc")

NS_PER_SECOND = 1_000_000_000
WISH = (HEADER, WISHED)
"""The metadata with which a client asks for receipts."""
UNPARSABLE = "Unable to parse request"
"""Triton's text, with INTERNAL."""


class ClientDisconnected(Exception):
    """The client has disconnected; the method is about to be cancelled."""


class RpcHead(ABC):
    """The client of an RPC, and its headers. The guard of the method sets `caller`.

    `begun_ns` is the time at which its headers were served (`time.perf_counter_ns`), 0 if unknown.
    It is `untimed` if its headers are known to name no further time than `grpc-timeout`.
    """

    __slots__ = ("begun_ns", "caller")
    untimed = False

    def __init__(self) -> None:
        self.begun_ns = 0
        self.caller: Caller | None = None

    @property
    @abstractmethod
    def metadata(self) -> Metadata:
        """The initial metadata of the client, without the headers of gRPC itself."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """The address of the client in gRPC's notation: `ipv4:127.0.0.1:40000`; "" if unknown."""

    @property
    def wants_timing(self) -> bool:
        """Whether the client asks for the receipts of its requests."""
        return WISH in self.metadata

    @property
    def wants_limits(self) -> bool:
        """Whether the client asks for the limits of its caller."""
        return WANTS_LIMITS in self.metadata

    @property
    def authority(self) -> str:
        """The `:authority` of the RPC; "" if the transport does not have it."""
        return ""

    @property
    def certificate(self) -> str | None:
        """The identity of the client's certificate; None without mutual TLS."""
        return None

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None without a deadline."""
        return None

    @property
    def deadline(self) -> Deadline | None:
        """That of the RPC, which its transport ends then."""
        remaining = self.time_remaining()
        if remaining is None:
            return None
        return Deadline(whole_ns=time.perf_counter_ns() + int(remaining * NS_PER_SECOND))


class RpcCall(RpcHead):
    """Interface between a method and the transport of its RPC.

    The task of the method is cancelled when the client disconnects or its deadline passes.
    """

    __slots__ = ()

    @abstractmethod
    async def send(self, messages: Sequence[bytes]) -> None:
        """Send messages of a streamed answer, in order; return when the buffer has room.

        Raises ClientDisconnected after a disconnect.
        """

    def write(self, messages: Sequence[bytes]) -> bool:
        """Send messages of a streamed answer at once; False, and none is sent, if `send` has to.

        Not while `send` is under way.
        """
        return False

    @abstractmethod
    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Send the initial metadata immediately; at most once, before any message."""

    @abstractmethod
    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Store the metadata that is sent after the messages, together with the status."""

    @abstractmethod
    def on_end(self, ended: Callable[[], None]) -> None:
        """Call a function when the RPC has ended: answered, failed or cancelled."""


class BegunCall(RpcHead):
    """Interface between a method without a task and the transport of its RPC.

    The method ends the RPC by one call of `answer` or `fail`, from any code on the event loop.
    After a disconnect that call is required, and has no effect.
    """

    __slots__ = ()

    @abstractmethod
    def on_disconnect(self, disconnected: Callable[[], object]) -> None:
        """Call a function when the client disconnects before the end of the RPC, or this fails."""

    @abstractmethod
    def answer(self, message: bytes, trailing: Metadata = ()) -> None:
        """End the RPC with a message, and trailing metadata."""

    @abstractmethod
    def fail(self, error: RpcError, trailing: Metadata = ()) -> None:
        """End the RPC with an error."""


class Beginning(Protocol):
    """A unary method that needs no task for some messages."""

    def may_begin(self, size_bytes: int) -> bool:
        """Whether a message of this size can be answered without a task."""

    def begin(self, message: Any, call: BegunCall) -> None:
        """Answer a message now or later. An exception ends the RPC, as `fail`."""


class Transport(ABC):
    """Server of methods at one address.

    Needs a running event loop. OSError if the address cannot be bound or the TLS files not used.
    """

    certificates: Certificates | None = None
    """Those of TLS, to be followed while the server runs."""
    port: int
    """0 for a Unix socket."""

    @abstractmethod
    async def start(self) -> None:
        """Start accepting connections."""

    @abstractmethod
    async def stop(self) -> None:
        """Refuse new RPCs; return when the running ones have ended."""

    @abstractmethod
    async def cut_off(self, grace_secs: float) -> None:
        """Drop the connections that remain after the grace period; call after `stop`."""


def translated(error: BaseException) -> RpcError:
    """The RpcError of any error; an unexpected error is logged, and its text is not sent."""
    if isinstance(error, RpcError):
        return error
    if isinstance(error, InferenceError):
        return rpc_error(error)
    log.error("request failed unexpectedly", exc_info=error)
    return rpc_error(unexpected())


class _ErrorTranslation:
    """Translates the errors of one RPC in a frontend into RpcError.

    A CancelledError counts as unexpected unless the task of the RPC is being cancelled, because the
    client still waits.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, PASSED):
            return
        if isinstance(error, Exception) or _is_stray(error):
            raise translated(error) from None


def _is_stray(error: BaseException) -> bool:
    """Whether a CancelledError has another cause than the cancellation of this task."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is None or not task.cancelling()


ERROR_TRANSLATION = _ErrorTranslation()
PASSED = (RpcError, ClientDisconnected)

Serve = Callable[[Any, RpcCall], Awaitable[Any]]
Parse = Callable[[bytes], Any]
ParseLarge = Callable[[bytes, RpcCall], Awaitable[Any]]
Serialize = Callable[[Any], bytes]
Guard = Callable[[RpcHead], None]


@dataclass(frozen=True, slots=True)
class Method:
    """The method of one path.

    `serve` takes a message, or an async iterator of messages if the client streams, and the call.
    It returns a message; if the server streams it sends its messages and returns None. It may raise
    InferenceError or RpcError. The iterator also ends when the client disconnects, directly before
    the task is cancelled. `compresses` allows compression of the answers. `parse_large` parses
    messages above LARGE_BYTES without blocking the event loop. `beginning` is the same method
    without a task, for messages up to that size. `guard` refuses an RPC by RpcError.
    """

    serve: Serve
    parse: Parse
    serialize: Serialize
    client_streams: bool = False
    server_streams: bool = False
    compresses: bool = False
    beginning: Beginning | None = None
    parse_large: ParseLarge | None = None
    guard: Guard | None = None

    async def answer(self, message: bytes, call: RpcCall) -> bytes:
        """The answer to a message of a unary RPC. Raises only RpcError or ClientDisconnected."""
        with ERROR_TRANSLATION:
            if self.guard is not None:
                self.guard(call)
            if len(message) <= LARGE_BYTES or self.parse_large is None:
                asked = self.parsed(message)
            else:
                asked = await self.parsed_large(self.parse_large(message, call))
            return self.serialize(await self.serve(asked, call))

    def begin(self, beginning: Beginning, message: bytes, call: BegunCall) -> None:
        """Answer a message of a unary RPC without a task."""
        try:
            if self.guard is not None:
                self.guard(call)
            beginning.begin(self.parsed(message), call)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - around one request
            call.fail(translated(error))

    async def run(self, messages: AsyncIterable[bytes], call: RpcCall) -> None:
        """Answer a streaming RPC. Raises only RpcError or ClientDisconnected."""
        with ERROR_TRANSLATION:
            if self.guard is not None:
                self.guard(call)
            asked: Any = ParsedMessages(self, messages, call)
            if not self.client_streams:
                asked = await self._only(asked)
            answer = await self.serve(asked, call)
            if not self.server_streams:
                await call.send([self.serialize(answer)])

    async def _only(self, asked: AsyncIterable[Any]) -> Any:
        async for message in asked:
            return message
        raise RpcError(StatusCode.UNIMPLEMENTED, "the client sent no message, expected one")

    def parsed(self, message: bytes) -> Any:
        """The parsed message; RpcError INTERNAL if the bytes are not one."""
        try:
            return self.parse(message)
        except DecodeError:
            raise RpcError(StatusCode.INTERNAL, UNPARSABLE) from None

    async def parsed_large(self, parsing: Awaitable[Any]) -> Any:
        """The result of parsing a large message; raises as `parsed`."""
        try:
            return await parsing
        except DecodeError:
            raise RpcError(StatusCode.INTERNAL, UNPARSABLE) from None

    @property
    def unary(self) -> bool:
        """Whether one message is answered with one message."""
        return not (self.client_streams or self.server_streams)


class ParsedMessages:
    """Async iterator that parses the messages of a client.

    `is_parsing` is true while a received large message is parsed in a thread.
    """

    __slots__ = ("_call", "_iterator", "_messages", "_method", "is_parsing")

    def __init__(self, method: Method, messages: AsyncIterable[bytes], call: RpcCall) -> None:
        self.is_parsing = False
        self._method = method
        self._messages = messages
        self._call = call
        self._iterator: AsyncIterator[bytes] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:
            # Created here because Python warns about an async generator that is never read.
            self._iterator = aiter(self._messages)
        message = await anext(self._iterator)
        parse_large = self._method.parse_large
        if len(message) <= LARGE_BYTES or parse_large is None:
            return self._method.parsed(message)
        self.is_parsing = True
        try:
            return await self._method.parsed_large(parse_large(message, self._call))
        finally:
            self.is_parsing = False
