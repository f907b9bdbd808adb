"""The HTTP client of the chat: index and metadata of models, answers by generate_stream."""

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from gateway.tools.chat.server import (
    FINISH_REASON,
    NO_HEADERS,
    NUM_OUTPUT_TOKENS,
    TEXT_OUTPUT,
    AnswerPart,
    ChatError,
    ChatModel,
    ChatServer,
    Listed,
    Question,
    Refused,
    Unreachable,
    refusal,
)

DEFAULT_PORT = 8000
ANSWERS_WITHIN_SECS = 10.0
"""Time limit of index and metadata requests; answers have none."""

NO_INDEX = (403, 404, 405, 501)
NOT_HTTP = f"is it the gRPC port? HTTP's is {DEFAULT_PORT} by default"
FIELD = b"data:"
READ_BYTES = 65536

T = TypeVar("T")


class HttpChatServer(ChatServer):
    """`url` has a scheme, a host and perhaps a port. Every request has its own connection."""

    def __init__(self, url: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.url = url
        self._headers = headers

    async def models(self) -> Sequence[Listed] | None:
        try:
            return await self._answer_of("POST", "/v2/repository/index", _index)
        except _NoIndex:
            return None

    async def describe(self, name: str) -> ChatModel:
        return await self._answer_of("GET", f"/v2/models/{quote(name, safe='')}", _chat_model)

    async def answer(self, question: Question) -> AsyncGenerator[AnswerPart, None]:
        name = question.model.name
        path = f"/v2/models/{quote(name, safe='')}/generate_stream"
        exchange = _Exchange(self.url, self._headers, None)
        try:
            response = await exchange.ask("POST", path, _body(question))
            if response.status != http.HTTPStatus.OK:
                raise refusal(name, _error(response.status, await exchange.wait(response.read)))
            lines = Lines()
            # Unlike `readline`, this distinguishes a broken connection from a complete answer.
            while arrived := await exchange.wait(lambda: response.read1(READ_BYTES)):
                for event in lines.events(arrived):
                    yield self._read(event, lambda found: _part(name, found))
        finally:
            exchange.stop()

    async def close(self) -> None:
        """Nothing to close: each request has its own connection."""

    async def _answer_of(self, method: str, path: str, read: Callable[[Any], T]) -> T:
        exchange = _Exchange(self.url, self._headers, ANSWERS_WITHIN_SECS)
        try:
            response = await exchange.ask(method, path, b"")
            body = await exchange.wait(response.read)
        finally:
            exchange.stop()
        if response.status in NO_INDEX:
            raise _NoIndex(_error(response.status, body))
        if response.status != http.HTTPStatus.OK:
            raise Refused(_error(response.status, body))
        return self._read(body, read)

    def _read(self, body: bytes, read: Callable[[Any], T]) -> T:
        try:
            return read(json.loads(body))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Refused(f"what answers at {self.url} does not speak the v2 protocol") from None


class Lines:
    """Server-sent events of one line each, from chunks of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def events(self, arrived: bytes) -> Sequence[bytes]:
        """The data of the events that are complete now; comments and other fields are skipped."""
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        return [line.removeprefix(FIELD) for line in lines if line.startswith(FIELD)]


class _NoIndex(Refused):
    """The server has no such route or model, or the key is not allowed to use it."""


class _Exchange:
    """One request and its response on a connection of their own; a thread blocks on the socket."""

    def __init__(self, url: str, headers: Mapping[str, str], patience_secs: float | None) -> None:
        self._url = url
        self._headers = {**headers, "Connection": "close"}
        self._patience_secs = patience_secs
        self._connection = _connection(url)
        self._socket: socket.socket | None = None

    async def ask(self, method: str, path: str, body: bytes) -> http.client.HTTPResponse:
        """Send the request, and wait for the head of the response."""
        return await self.wait(lambda: self._ask(method, path, body))

    async def wait(self, read: Callable[[], T]) -> T:
        """The result of a blocking `read`; Unreachable if the connection fails."""
        try:
            return await asyncio.to_thread(read)
        except OSError as error:
            reason = error.strerror or error
            raise Unreachable(f"no server answers at {self._url}: {reason}") from None
        except UnicodeError:
            raise Refused(
                f"--url is '{self._url}', which has no name that a host can have"
            ) from None
        except http.client.BadStatusLine:
            raise Refused(f"what answers at {self._url} speaks no HTTP: {NOT_HTTP}") from None
        except http.client.HTTPException:
            raise Unreachable(f"the answer of {self._url} ended in the middle") from None

    def stop(self) -> None:
        """Close the connection, which ends a blocking read in a thread."""

        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _ask(self, method: str, path: str, body: bytes) -> http.client.HTTPResponse:
        self._connection.connect()
        self._socket = self._connection.sock
        self._socket.settimeout(self._patience_secs)
        self._connection.request(method, path, body, self._headers)
        return self._connection.getresponse()


def _connection(url: str) -> http.client.HTTPConnection:
    try:
        place = urlsplit(url)
        if place.scheme == "https":
            return http.client.HTTPSConnection(place.netloc, timeout=ANSWERS_WITHIN_SECS)
        return http.client.HTTPConnection(place.netloc, timeout=ANSWERS_WITHIN_SECS)
    except (ValueError, http.client.InvalidURL) as error:
        raise ChatError(f"--url is '{url}', expected http://HOST:PORT: {error}") from None


def _body(question: Question) -> bytes:
    body: dict[str, Any] = dict(question.inputs())
    if parameters := question.parameters():
        body["parameters"] = parameters
    return json.dumps(body).encode()


def _part(model: str, event: Mapping[str, Any]) -> AnswerPart:
    if "error" in event:
        raise refusal(model, str(event["error"]))
    return AnswerPart(
        text=_first(event.get(TEXT_OUTPUT)) or "",
        tokens=_first(event.get(NUM_OUTPUT_TOKENS)),
        finish_reason=_first(event.get(FINISH_REASON)) or "",
    )


def _first(value: Any) -> Any:
    """An output of one element is that element, of several a list (generate extension)."""
    return value[0] if isinstance(value, list) and value else value


def _error(status: int, body: bytes) -> str:
    """The message of an error, which a stream sends as an event."""
    try:
        return str(json.loads(body.removeprefix(FIELD))["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}"


def _index(rows: Any) -> Sequence[Listed]:
    return [Listed(row["name"], row.get("state", ""), row.get("reason", "")) for row in rows]


def _chat_model(found: Any) -> ChatModel:
    return ChatModel(
        name=found["name"],
        platform=found["platform"],
        inputs={each["name"]: len(each["shape"]) for each in found["inputs"]},
        outputs=frozenset(each["name"] for each in found["outputs"]),
    )
