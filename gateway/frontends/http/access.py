"""Requests over HTTP as the logs note them: route, status, caller and sizes."""

import re
from collections.abc import Callable, Iterable
from functools import partial

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.frontends.http.connection_parts import LENGTH
from gateway.frontends.http.request_scope import (
    CALLER,
    NO_STATE,
    OK,
    SEND_PIECE,
    SEND_WHOLE,
    WATCH,
    WRITE_PIECE,
    BeginningApp,
    Parts,
    RawHeaders,
    RequestState,
    Start,
)
from gateway.observability.access_log import AccessLog
from gateway.observability.request_context import LoggedRequest
from gateway.observability.traceparent import TRACEPARENT
from gateway.policy.areas import AREA_OF_ROUTE, AREA_OF_ROUTE_CHANGE, CHANGING, Area
from gateway.request_memo import MOST_BYTES, RequestMemo

FAILED, GONE = 500, 499
"""The status of an unexpected error, and of a client that was gone before its answer (nginx)."""
PARENT_HEADER = TRACEPARENT.encode()
NAME = re.compile(r"\\{\w+(:path)?\\}")


class Routes:
    """The templates of paths, so that a path itself, which may hold anything, is in no log."""

    def __init__(self, templates: Iterable[str]) -> None:
        self._templates = sorted(templates)  # a fixed path before one with names
        self._pattern = re.compile("|".join(f"({_pattern(each)})" for each in self._templates))
        self._known: RequestMemo[str, str] = RequestMemo()

    def of(self, path: str) -> str:
        """The template of a path; "" for one that no route has."""
        known = self._known.get(path)
        if known is not None:
            return known
        found = self._pattern.fullmatch(path)
        number = 0 if found is None else found.lastindex or 0
        template = self._templates[number - 1] if number else ""
        if len(path) <= MOST_BYTES:
            self._known[path] = template
        return template


def _pattern(template: str) -> str:
    return NAME.sub(lambda found: ".*" if found[1] else "[^/]+", re.escape(template))


ROUTES = Routes(path for path, area in AREA_OF_ROUTE.items() if area is not Area.METRICS)


class LoggedApp:
    """An application whose requests are noted for the logs."""

    def __init__(self, app: BeginningApp, log: AccessLog) -> None:
        self._app = app
        self._log = log

    def begin(self, cycle: RequestResponseCycle, start: Start) -> bool:
        """See `Begin`; lines of the process' log are about the request meanwhile."""
        scope: Scope = cycle.scope  # type: ignore[assignment]
        with self._request(scope).current():
            return self._app.begin(cycle, start)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = self._request(scope)
        # The connection may have the same state for the next request.
        state: RequestState = scope.get("state", NO_STATE).copy()
        answer = _NotedAnswer(request, send, state)
        with request:
            try:
                await self._app({**scope, "state": state}, receive, answer.send)
            except Exception:
                request.status = request.status or FAILED
                raise
            finally:
                if not request.status or (answer.is_gone and request.status != OK):
                    request.status = GONE
                request.caller = state.get(CALLER)

    def _request(self, scope: Scope) -> LoggedRequest:
        method, route = scope["method"], ROUTES.of(scope["path"])
        address, _ = scope.get("client") or ("", 0)
        parents = []
        length = b""
        for name, value in scope["headers"]:
            if name == PARENT_HEADER:
                parents.append(value.decode("latin-1"))
            elif name == LENGTH:
                length = value
        found = self._log.request("http", route, method, str(address), parents)
        found.bytes_in = int(length) if length.isdigit() else 0
        found.changes = method == CHANGING and route in AREA_OF_ROUTE_CHANGE
        return found


class _NotedAnswer:
    """The status and the bytes of an answer, by messages of ASGI or by the connection itself.

    The client `is_gone` if it disconnected while its request was in flight.
    """

    def __init__(self, request: LoggedRequest, send: Send, state: RequestState) -> None:
        self._request = request
        self._send = send
        self.is_gone = False
        if WATCH in state:
            self._watch = state[WATCH]
            state[WATCH] = self.watch
        if SEND_WHOLE in state:
            self._send_whole = state[SEND_WHOLE]
            state[SEND_WHOLE] = self.send_whole
        if SEND_PIECE in state:
            self._send_piece = state[SEND_PIECE]
            state[SEND_PIECE] = self.send_piece
        if WRITE_PIECE in state:
            self._write_piece = state[WRITE_PIECE]
            state[WRITE_PIECE] = self.write_piece

    def watch(self, on_disconnect: Callable[[], object] | None) -> None:
        self._watch(None if on_disconnect is None else partial(self._note_gone, on_disconnect))

    def _note_gone(self, on_disconnect: Callable[[], object]) -> None:
        self.is_gone = True
        on_disconnect()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._request.status = message["status"]
        else:
            self._request.bytes_out += len(message.get("body", b""))
        await self._send(message)

    async def send_whole(self, headers: RawHeaders, parts: Parts) -> None:
        self._request.status = OK
        self._request.bytes_out += sum(map(len, parts))
        await self._send_whole(headers, parts)

    async def send_piece(self, piece: bytes) -> None:
        self._request.bytes_out += len(piece)
        await self._send_piece(piece)

    def write_piece(self, piece: bytes) -> bool:
        is_written = self._write_piece(piece)
        self._request.bytes_out += len(piece) if is_written else 0
        return is_written
