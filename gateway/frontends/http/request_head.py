"""The headers by which a client comes back, and those that tell it how."""

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


def version_of(request: Request) -> str:
    """The version in the path, "" if it has none; 404 if it is no number (protocol: HTTP routes).

    It may have more digits than any integer type: whoever looks it up refuses that.
    """
    version: str = request.path_params.get("version", "")
    if not is_version(version):
        raise HTTPException(404)
    return version


def is_version(text: str) -> bool:
    """Whether that is a number, or nothing."""
    return not text or (text.isascii() and text.isdigit())


LAST_EVENT_ID = "last-event-id"
"""Server-sent events, section 9.2.3: the id of the last event that the client has got."""
IDEMPOTENCY_KEY = "idempotency-key"

STREAM = "Sluice-Stream"
REPLAYED = "Idempotency-Replayed"


def resumed(recordings: Recordings, scope: Scope) -> RecordingReader:
    """What follows the last event that the client has got.

    The path must be the one the stream was asked for at. NOT_FOUND if there is no such stream.
    """
    given = Headers(scope=scope).get(LAST_EVENT_ID, "")
    return recordings.resume(EventId.parse(given), scope["path"])


def key_of(scope: Scope, *body: Buffer) -> Key | None:
    """The request's idempotency key, if it has one; INVALID_ARG if that is no good."""
    name = Headers(scope=scope).get(IDEMPOTENCY_KEY)
    return None if name is None else Key.of(name, scope["path"], body)


def replay_headers(responses: Responses) -> Mapping[str, str]:
    """What an answer says that was made for an earlier request with its key."""
    return (
        {REPLAYED: "true"} if isinstance(responses, RecordingReader) and responses.replayed else {}
    )


def stream_headers(responses: Responses) -> Mapping[str, str]:
    """What a stream of events says that can be resumed."""
    if not isinstance(responses, RecordingReader):
        return {}
    return {STREAM: responses.token, **replay_headers(responses)}


def id_line(event: EventId) -> bytes:
    """The line of an event with its id; it stands before or behind the data."""
    return b"id: %b\n" % str(event).encode()


class HeaderFilter:
    """Picks headers by a regular expression that is found in their names, whatever their case."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern.encode(), re.IGNORECASE) if pattern else None

    def of(self, scope: Scope) -> Iterable[tuple[str, str]]:
        """Name and value of each header that is to be forwarded; none without a pattern."""
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
