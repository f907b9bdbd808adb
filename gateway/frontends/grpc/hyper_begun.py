"""RPCs of one connection that begin and end without a task."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, NamedTuple, Protocol

from httpunk import HeaderMap

from gateway.admission.deadlines import TIMES
from gateway.frontends.grpc.http2_wire import (
    DEADLINE,
    DEADLINE_PASSED,
    ENCODING,
    authority_of,
    framed,
    only_message,
    read_metadata,
    require_grpc,
    timeout_secs,
    written_metadata,
)
from gateway.frontends.grpc.hyper_call import (
    BEGUN,
    HTTP_OK,
    SMALL_BYTES,
    STATUS,
    Client,
    HyperCall,
    HyperEvent,
    is_whole,
    whole_body,
)
from gateway.frontends.grpc.refusals import WANTS_LIMITS
from gateway.frontends.grpc.response import MAX_MESSAGE_BYTES
from gateway.frontends.grpc.rpc import WISH, BegunCall, Method
from gateway.frontends.grpc.status import Metadata, RpcError, StatusCode
from gateway.policy.caller import Caller
from gateway.settings import CompressionLevel

OK = (STATUS, str(int(StatusCode.OK)))
ANSWERED = HeaderMap((OK,))
"""Trailers of an answer without metadata."""

TIMING, LIMITS = ((name.encode(), value.encode()) for name, value in (WISH, WANTS_LIMITS))

log = logging.getLogger("sluice.grpc")

Create = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class _Wishes(NamedTuple):
    """The wishes in the headers of an RPC: its receipt, the limits of its caller."""

    timing: bool
    limits: bool


NO_WISHES = _Wishes(timing=False, limits=False)


class RpcOwner(Client, Protocol):
    """The connection of the RPCs."""

    def new_call(self, request: Any) -> HyperCall:
        """The call of a request."""

    def until_end(
        self, request: Any, call: HyperCall, serving: Awaitable[None]
    ) -> Coroutine[Any, Any, None]:
        """Serve one RPC, send its error if it has one, and end its call."""

    def send_together(self, send: Callable[[], None]) -> None:
        """Call a function that sends frames, and write them at once."""

    def start(self, request: Any, task: "asyncio.Task[None]") -> None:
        """Own the task of an RPC; a reset cancels it."""


class BegunCalls:
    """The RPCs of one connection that were begun without a task, and have not ended."""

    def __init__(self, owner: RpcOwner, compression: CompressionLevel) -> None:
        self._owner = owner
        self.client: Client = owner
        """The client of the connection."""
        self._compresses = compression is not CompressionLevel.NONE
        self._loop = asyncio.get_running_loop()
        self._calls: set[BegunHyperCall] = set()
        self._known_headers: object = None  # accepted ones, without a deadline
        self._known_caller: Caller | None = None  # of the last request with these
        self._known_wishes = NO_WISHES
        self._none = HyperEvent()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, request: Any, method: Method) -> bool:
        """Begin an RPC; False if it needs a task.

        That is the case with compression, an error in the headers, or a message that is incomplete
        or large.
        """
        beginning, secs, wishes = method.beginning, None, self._known_wishes
        if beginning is None or (method.compresses and self._compresses):
            return False
        headers = request.method, request.headers.raw_items()
        is_known = is_untimed = headers == self._known_headers
        if not is_known:
            allowed = request.headers.get(DEADLINE)
            try:
                require_grpc(request)
                secs = None if allowed is None else timeout_secs(allowed)
            except RpcError:
                return False
            if request.headers.get(ENCODING) is not None:
                return False
            is_untimed = TIMES.isdisjoint(dict(headers[1]))
            wishes = _Wishes(TIMING in headers[1], LIMITS in headers[1])
            if allowed is None and is_untimed:
                self._known_headers, self._known_caller = headers, None
                self._known_wishes, is_known = wishes, True
        message = _whole_message(request, beginning.may_begin)
        if message is None:
            return False
        call = BegunHyperCall(self, request, wishes)
        call.untimed = is_untimed
        if is_known:
            call.caller = self._known_caller
        if secs is not None:
            call.ends_at = self._loop.time() + secs
            call.expiry = self._loop.call_later(secs, call.expire)
        self._calls.add(call)
        request._stream.reset_evt.listen(call.cancel)
        method.begin(beginning, message, call)
        if is_known:
            self._known_caller = call.caller
        return True

    def answer(self, call: "BegunHyperCall", message: bytes, trailing: Metadata) -> None:
        """End an RPC with its message, and trailing metadata."""
        send = partial(self._send_answer, call.request, message, trailing)
        try:
            self._owner.send_together(send)
        finally:
            self.discard(call)

    def fail(self, call: "BegunHyperCall", error: RpcError, trailing: Metadata) -> None:
        """End an RPC with an error."""
        full = self._owner.new_call(call.request)
        full.set_trailing_metadata(trailing)
        try:
            self._owner.send_together(partial(self._send, full, call.request, full.fail(error)))
        finally:
            self.discard(call)

    def discard(self, call: "BegunHyperCall") -> None:
        """End an RPC without an answer."""
        self._calls.discard(call)
        if not self._calls:
            self._none.set()

    def cancel(self) -> None:
        """End all without an answer."""
        for call in tuple(self._calls):
            call.cancel()

    async def ended(self) -> None:
        """Wait until all have ended, or have a task."""
        while self._calls:
            self._none.clear()
            await self._none.wait()

    def _send_answer(self, request: Any, message: bytes, trailing: Metadata) -> None:
        rest: Coroutine[Any, Any, None] | None
        if len(message) > SMALL_BYTES:
            call = self._owner.new_call(request)
            call.set_trailing_metadata(trailing)
            self._send(call, request, call.answer(message))
            return
        try:
            rest = _send_at_once(request, message, _trailers(trailing) if trailing else ANSWERED)
        except Exception as error:  # noqa: BLE001 - it would reach the model that has answered
            rest = _failed(error)
        if rest is not None:
            self._send(self._owner.new_call(request), request, rest)

    def _send(self, call: HyperCall, request: Any, ending: Coroutine[Any, Any, None]) -> None:
        """End a request; `ending` sends its end, in a task from its first wait on."""
        sending = self._owner.until_end(request, call, ending)
        try:
            task = start_eagerly(sending, self._loop.create_task)
        except (Exception, asyncio.CancelledError):
            # Around one request in a frontend: an error would reach the model that has answered.
            log.exception("request failed unexpectedly")
            task = self._loop.create_task(request.reset())
        if task is not None:
            self._owner.start(request, task)


class BegunHyperCall(BegunCall):
    """An RPC without a task.

    `expiry` is the timer of the client's deadline, at the loop's time `ends_at`; sending an answer
    that is ready may take longer. uvloop has no timer for times that have passed, but a handle.
    Its client has `wishes` for its answer.
    """

    __slots__ = (
        "_calls",
        "_disconnected",
        "_ended",
        "_wishes",
        "certificate",
        "ends_at",
        "expiry",
        "request",
        "untimed",
    )

    def __init__(self, calls: "BegunCalls", request: Any, wishes: "_Wishes" = NO_WISHES) -> None:
        super().__init__()
        self.request = request
        self._wishes = wishes
        self._calls = calls
        self.certificate: str | None = calls.client.certificate
        self._disconnected: Callable[[], object] | None = None
        self._ended = False
        self.expiry: asyncio.Handle | None = None
        self.ends_at = 0.0
        self.untimed = False

    @property
    def metadata(self) -> Metadata:
        return read_metadata(self.request.headers.raw_items())

    @property
    def peer(self) -> str:
        return self._calls.client.peer

    @property
    def authority(self) -> str:
        return authority_of(self.request)

    def time_remaining(self) -> float | None:
        if self.expiry is None:
            return None
        return self.ends_at - asyncio.get_running_loop().time()

    @property
    def wants_timing(self) -> bool:
        return self._wishes.timing

    @property
    def wants_limits(self) -> bool:
        return self._wishes.limits

    def on_disconnect(self, disconnected: Callable[[], object]) -> None:
        self._disconnected = disconnected

    def answer(self, message: bytes, trailing: Metadata = ()) -> None:
        if self._ends():
            self._calls.answer(self, message, trailing)

    def fail(self, error: RpcError, trailing: Metadata = ()) -> None:
        if self._ends():
            self._calls.fail(self, error, trailing)
            self._disconnect()

    def expire(self) -> None:
        """End the RPC at its deadline."""
        self.fail(RpcError(StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED))

    def cancel(self) -> None:
        """End the RPC without an answer: its client has disconnected."""
        if self._ends():
            self._calls.discard(self)
            self._disconnect()

    def _ends(self) -> bool:
        if self._ended:
            return False
        self._ended = True
        if self.expiry is not None:
            self.expiry.cancel()
        self.request._stream.reset_evt.listen(None)
        return True

    def _disconnect(self) -> None:
        if self._disconnected is not None:
            self._disconnected()


def _whole_message(request: Any, may_take: Callable[[int], bool]) -> bytes | None:
    """The message of a request if it `is_whole`, uncompressed, and of a size to take; else None."""
    if not is_whole(request):
        return None
    body = request._stream.body_recv.items[0][0]
    message = only_message(body, MAX_MESSAGE_BYTES) if may_take(len(body)) else None
    if message is not None:
        whole_body(request)
    return message


def _trailers(metadata: Metadata) -> HeaderMap:
    """The trailers of an answer with metadata."""
    return HeaderMap([OK, *written_metadata(metadata)])


def _send_at_once(
    request: Any, message: bytes, trailers: HeaderMap
) -> Coroutine[Any, Any, None] | None:
    """Send an answer of at most SMALL_BYTES; a coroutine sends what remains.

    That is the case if the client's window is full, or the stream has ended.
    """
    connection, stream = request._conn, request._stream
    (body,) = framed((message,))
    flags = connection.send_response_head(stream.id, HTTP_OK, BEGUN, False).flags
    sent = connection.send_data(stream.id, body, 0, False)
    if not sent.done:
        connection._after(flags | sent.flags)
        return _send_rest(request, body, sent.sent, trailers)
    ended = connection.send_trailers(stream.id, trailers)
    connection._after(flags | sent.flags | ended.flags)
    return None


async def _send_rest(request: Any, body: bytes, sent: int, trailers: HeaderMap) -> None:
    """Send the body behind its first `sent` bytes, and the trailers."""
    connection, stream = request._conn, request._stream
    await connection._send_data(stream, body, False, sent)
    connection._send_trailers(stream, trailers)


async def _failed(error: Exception) -> None:
    raise error


def start_eagerly(
    coroutine: Coroutine[Any, Any, None], create: Create
) -> "asyncio.Task[None] | None":
    """Run a coroutine up to its first wait; `create` makes a task for the rest, if any.

    As `asyncio.eager_task_factory` of Python 3.12. Up to the first wait the current task is the
    caller's, so the coroutine must not use timeouts or task groups there. An error before the
    first wait is raised here.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return create(_Rest(coroutine, awaited))


class _Rest(Coroutine[Any, Any, None]):
    """The rest of a coroutine that has run up to its first wait."""

    __slots__ = ("_awaited", "_coroutine", "_is_started")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._is_started = False

    def send(self, value: None) -> Any:
        if self._is_started:
            return self._coroutine.send(value)
        self._is_started = True
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *error: Any) -> Any:
        self._is_started, self._awaited = True, None
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("the rest of a coroutine can only be run by a task")
