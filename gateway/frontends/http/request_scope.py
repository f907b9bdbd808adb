"""The ASGI scope of a request: extensions of its connection, path and headers, traces.

The extensions stand in `scope["state"]`. They cost less than ASGI's messages: uvicorn checks those
header by header and writes them one by one, and each passes every layer of the application.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, TypedDict

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.dataplane import DataPlane
from gateway.frontends.http.traces import trace_of
from gateway.messages import InferRequest
from gateway.observability.trace import Trace
from gateway.observability.tracer import Tracer
from gateway.policy.caller import Caller, tenant_of
from gateway.policy.forwarding import ForwardedNames
from gateway.policy.restrictions import NO_RESTRICTIONS, Restrictions
from gateway.resumption.reader import EventId, RecordingReader, Responses
from gateway.resumption.recording import Key
from gateway.resumption.recordings import Recordings
from gateway.tensor import Buffer

RawHeaders = Iterable[tuple[bytes, bytes]]
Parts = Sequence[Buffer]

Watch = Callable[[Callable[[], object] | None], None]
"""Registers the function to call when the client disconnects; at once if it has. None ends that."""
SendWhole = Callable[[RawHeaders, Parts], Awaitable[None]]
"""Sends a whole response with status 200; one of the headers is the length of all parts."""
SendPiece = Callable[[bytes], Awaitable[None]]
"""Sends a piece of a body whose head ASGI has sent; returns when there is room for more."""
WritePiece = Callable[[bytes], bool]
"""Writes such a piece at once; False if the client has to read first, or has gone."""

Start = Callable[[ASGIApp], None]
"""Runs an application for one request in a task."""
Begin = Callable[[RequestResponseCycle, Start], bool]
"""Begins a request that has arrived as a whole, without a task; False if that is not possible.

The response is written to the connection once it is there, or an application is started for it.
"""

PendingResponse = Callable[[Scope], Awaitable[ASGIApp]]
"""Makes the response to a request for a stream of events, once the model's first responses came."""

WATCH: Final = "watch"
BEGIN_STREAM: Final = "begin_stream"
SEND_WHOLE: Final = "send_whole"
SEND_PIECE: Final = "send_piece"
WRITE_PIECE: Final = "write_piece"
HEADER_NAMES: Final = "header_names"
KNOWN_HEAD: Final = "known_head"
CALLER: Final = "caller"
CHANGE: Final = "change"
CERTIFICATE: Final = "certificate"
BEGUN_NS: Final = "begun_ns"


class RequestState(TypedDict, total=False):
    """`scope["state"]` of a request. Connections of ours offer all of it, other servers nothing.

    `header_names` are the names of the request's headers as the client wrote them, in order, if a
    model may get them. `begin_stream` gives back what only short answers need. `known_head` is what
    a route has found in the head of a request that it has let pass; the next request with the same
    head has it, too.
    `caller` is absent on a server without API keys, `certificate`, the identity of the client's
    certificate, without mutual TLS. `change` is what the request changes, for the audit log.
    `begun_ns` is the time of the first byte of the head (`time.perf_counter_ns`).
    """

    watch: Watch
    begin_stream: Callable[[], None]
    send_whole: SendWhole
    send_piece: SendPiece
    write_piece: WritePiece
    header_names: Sequence[bytes]
    known_head: Any
    caller: Caller
    change: Mapping[str, Any]
    certificate: str
    begun_ns: int


NO_STATE: RequestState = {}
"""The state of a request without a connection of ours."""

MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version}"

LAST_EVENT_ID = "last-event-id"
"""The id of the last event that the client has received (server-sent events, section 9.2.3)."""
IDEMPOTENCY_KEY = "idempotency-key"

STREAM = "Sluice-Stream"
REPLAYED = "Idempotency-Replayed"

TRACES = "sluice.traces"
"""The key of a request's traces in its scope; absent while tracing is off."""

HANDOVER = "sluice.handover"
"""The key of the function in the scope that takes over the sending of a stream of events."""

KEPT = ("type", "http_version", "method", "path", "query_string", "client", "state")
"""The keys of a scope that the connection or the stream reads while events are sent."""

ORIGIN = b"origin"
"""The header by which a browser names the page of a POST, or of a request to another origin."""

OK = 200
JOINED_BYTES = 64 * 1024
"""Bodies up to this size are copied into one buffer, which is cheaper than two writes."""


class OnDisconnect:
    """Inside `with`, `callback` is called if the client disconnects; the body must have been read.

    The connection calls it, so that no task has to wait. Without a connection it is never called.
    """

    __slots__ = ("_callback", "_watch")

    def __init__(self, scope: Scope, callback: Callable[[], object]) -> None:
        state: RequestState = scope.get("state", NO_STATE)
        self._watch = state.get(WATCH)
        self._callback = callback

    def __enter__(self) -> None:
        if self._watch is not None:
            self._watch(self._callback)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch(None)


def has_origin(scope: Scope) -> bool:
    """Whether a page in a browser may have sent a request."""
    return ORIGIN in dict(scope["headers"])


def caller_in(scope: Scope) -> Caller | None:
    """The caller of a request with an API key; None on a server without keys."""
    state: RequestState = scope.get("state", NO_STATE)
    return state.get(CALLER)


def tenant_in(scope: Scope) -> str:
    """The tenant of a request; "" on a server without API keys."""
    return tenant_of(caller_in(scope))


def piece_sender(scope: Scope, send: Send) -> SendPiece:
    """The connection's own `SendPiece`, or one that sends messages of ASGI."""
    state: RequestState = scope.get("state", NO_STATE)
    direct = state.get(SEND_PIECE)
    if direct is not None:
        return direct

    async def send_piece(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    return send_piece


def piece_writer(scope: Scope) -> WritePiece | None:
    """The connection's own `WritePiece`; None without a connection of ours."""
    state: RequestState = scope.get("state", NO_STATE)
    return state.get(WRITE_PIECE)


async def send_apart(send: Send, headers: RawHeaders, parts: Parts) -> None:
    """Send a response with status 200 by messages of ASGI: one for the head, one for each part."""
    await send({"type": "http.response.start", "status": OK, "headers": headers})
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})


async def send_whole(cycle: RequestResponseCycle, headers: RawHeaders, parts: Parts) -> None:
    """Send a whole response with status 200, as uvicorn does for ASGI's two messages.

    `headers` are not checked; one of them is the length of all `parts` together.
    """
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if not cycle.disconnected:
        write_whole(cycle, headers, parts)


def write_whole(
    cycle: RequestResponseCycle,
    headers: RawHeaders,
    parts: Parts,
    status: int = OK,
    lines: bytes = b"",
) -> None:
    """Send a whole response to a connected client, without a wait for room.

    The `lines` are further headers, each with its end.
    """
    cycle.response_started = cycle.response_complete = True
    head = [STATUS_LINE[status]]
    for name, value in headers:
        head += (name, b": ", value, b"\r\n")
    head += (lines, b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
    if sum(map(len, parts)) <= JOINED_BYTES:
        cycle.transport.write(b"".join((*head, *parts)))
    else:
        cycle.transport.writelines((b"".join(head), *parts))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


def addressed(request: Request, dataplane: DataPlane) -> tuple[str, str]:
    """The model and the version in the path, "" without a version; 404 as `path_address`."""
    named, caller = request.path_params, caller_in(request.scope)
    found = path_address(dataplane, named["model"], named.get("version", ""), caller=caller)
    if found is None:
        raise HTTPException(404)
    return found


def path_address(
    dataplane: DataPlane, name: str, version: str, *, caller: Caller | None
) -> tuple[str, str] | None:
    """The model and the version that a path names, by its number or label; None for others.

    A number may have more digits than any integer type; its look-up refuses that.
    """
    found = name, version = dataplane.address(name, version, caller)
    is_number = not version or (version.isascii() and version.isdigit())
    return found if is_number or dataplane.has_label(name, version, caller) else None


class HeaderFilter:
    """Picks the headers that the model gets as parameters; it is `on` if there may be some."""

    def __init__(self, pattern: str, restrictions: Restrictions = NO_RESTRICTIONS) -> None:
        self._names = ForwardedNames(pattern, (each.name for each in restrictions.values()))
        self.on = self._names.on

    def of(self, scope: Scope) -> Iterable[tuple[str, str]]:
        """Name, as the client wrote it, and value of each forwarded header."""
        if not self.on:
            return ()
        values = [value for _, value in scope["headers"]]
        state: RequestState = scope.get("state", NO_STATE)
        names = state.get(HEADER_NAMES) or [name for name, _ in scope["headers"]]
        return [
            (name, value.decode("latin-1"))
            for name, value in zip((each.decode("latin-1") for each in names), values, strict=True)
            if self._names.include(name)
        ]


def key_of(scope: Scope, *body: Buffer) -> Key | None:
    """The idempotency key of a request, if it has one; INVALID_ARG if the key is malformed."""
    name = Headers(scope=scope).get(IDEMPOTENCY_KEY)
    return None if name is None else Key.of(name, scope["path"], body)


def replay_headers(responses: Responses) -> Mapping[str, str]:
    """The headers of an answer that an earlier request with the same key has produced."""
    return (
        {REPLAYED: "true"} if isinstance(responses, RecordingReader) and responses.replayed else {}
    )


async def resumed(recordings: Recordings, scope: Scope) -> RecordingReader:
    """The stream behind the last event that the client has received.

    The path must be that of the request that began the stream. NOT_FOUND without such a stream.
    """
    given = Headers(scope=scope).get(LAST_EVENT_ID, "")
    return await recordings.resume_anywhere(EventId.parse(given), scope["path"], caller_in(scope))


def stream_headers(responses: Responses) -> Mapping[str, str]:
    """The headers of a stream of events that can be resumed."""
    if not isinstance(responses, RecordingReader):
        return {}
    return {STREAM: responses.token, **replay_headers(responses)}


def id_line(event: EventId) -> bytes:
    """The line of an event with its id, before or behind the lines of data."""
    return b"id: %b\n" % str(event).encode()


class StreamHandover:
    """Sends the streams of events of an application after it has returned.

    A stream may be silent for hours. The frames and values of the application's layers, of the
    route and of the request take 10 KiB, and the stream needs none of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handed: list[PendingResponse] = []
        scope[HANDOVER] = handed.append
        await self._app(scope, receive, send)
        if handed:
            state: RequestState = scope.get("state", NO_STATE)
            if BEGIN_STREAM in state:
                state[BEGIN_STREAM]()
            _trim(scope)
            response = await handed.pop()(scope)
            await response(scope, receive, send)
            # The connection's functions would make a cycle with its scope.
            scope.pop("state", None)


def _trim(scope: Scope) -> None:
    """Drop what only the application reads. The connection has the same scope and headers."""
    state: RequestState = scope.get("state", NO_STATE)
    for each in (scope["headers"], state.get(HEADER_NAMES)):
        if isinstance(each, list):
            each.clear()
    kept = {key: scope[key] for key in KEPT if key in scope}
    scope.clear()
    scope.update(kept)


class BeginningApp(Protocol):
    """An application that begins some requests without a task."""

    def begin(self, cycle: RequestResponseCycle, start: Start) -> bool:
        """See `Begin`."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """As ASGI has it."""


class TracedApp:
    """An application that stamps the traces of a request when its response is sent."""

    def __init__(self, app: BeginningApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer
        self.begin = app.begin
        """See `Begin`."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._traced if self._tracer.on else self._app
        return app(scope, receive, send)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        traces: list[Trace] = []
        scope[TRACES] = traces

        async def send_and_stamp(message: Message) -> None:
            if message["type"] == "http.response.start":
                for trace in traces:
                    trace.stamp("HTTP_SEND_START")
            await send(message)

        try:
            await self._app(scope, receive, send_and_stamp)
        finally:
            for trace in traces:
                trace.stamp("HTTP_SEND_END")
                trace.sent()


def begun_at(scope: Scope, request: InferRequest) -> int:
    """The time of the first byte of a request, or that of its route without our connection."""
    state: RequestState = scope.get("state", NO_STATE)
    return state.get(BEGUN_NS, request.received_ns)


def begin_trace(scope: Scope, tracer: Tracer, request: InferRequest, whole_ns: int) -> Trace | None:
    """The trace of a request whose body was whole then, if the request is sampled."""
    traces: list[Trace] | None = scope.get(TRACES)
    if traces is None:
        return None
    trace = trace_of(scope["headers"], tracer, request, begun_at(scope, request), whole_ns)
    if trace is not None:
        traces.append(trace)
    return trace
