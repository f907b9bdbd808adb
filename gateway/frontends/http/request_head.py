"""Heads of requests: model and version, forwarded headers, idempotency keys and event ids.

Next to each header stand those that answer it.
"""

import re
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Scope

from gateway.frontends.http.asgi_extensions import HEADER_NAMES, NO_STATE, RequestState
from gateway.resumption.idempotency import Key
from gateway.resumption.reader import EventId, RecordingReader, Responses
from gateway.resumption.recordings import Recordings
from gateway.tensor import Buffer

MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version}"

LAST_EVENT_ID = "last-event-id"
"""The id of the last event that the client has received (server-sent events, section 9.2.3)."""
IDEMPOTENCY_KEY = "idempotency-key"

STREAM = "Sluice-Stream"
REPLAYED = "Idempotency-Replayed"


def version_of(request: Request) -> str:
    """The version in the path, "" without one; 404 if it is not a number (protocol: HTTP routes).

    It may have more digits than any integer type; its look-up refuses that.
    """
    version: str = request.path_params.get("version", "")
    if not is_version(version):
        raise HTTPException(404)
    return version


def is_version(text: str) -> bool:
    """Whether a text is a number, or empty."""
    return not text or (text.isascii() and text.isdigit())


class HeaderFilter:
    """Picks headers whose names match a regular expression, regardless of case.

    The model gets them as parameters (protocol: header forwarding).
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern.encode(), re.IGNORECASE) if pattern else None

    def of(self, scope: Scope) -> Iterable[tuple[str, str]]:
        """Name, as the client wrote it, and value of each forwarded header."""
        if self._pattern is None:
            return ()
        values = [value for _, value in scope["headers"]]
        state: RequestState = scope.get("state", NO_STATE)
        names = state.get(HEADER_NAMES) or [name for name, _ in scope["headers"]]
        return [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in zip(names, values, strict=True)
            if self._pattern.search(name)
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


def resumed(recordings: Recordings, scope: Scope) -> RecordingReader:
    """The stream behind the last event that the client has received.

    The path must be that of the request that began the stream. NOT_FOUND without such a stream.
    """
    given = Headers(scope=scope).get(LAST_EVENT_ID, "")
    return recordings.resume(EventId.parse(given), scope["path"])


def stream_headers(responses: Responses) -> Mapping[str, str]:
    """The headers of a stream of events that can be resumed."""
    if not isinstance(responses, RecordingReader):
        return {}
    return {STREAM: responses.token, **replay_headers(responses)}


def id_line(event: EventId) -> bytes:
    """The line of an event with its id, before or behind the lines of data."""
    return b"id: %b\n" % str(event).encode()
