"""The headers by which a client comes back, and those that tell it how."""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.resumption.idempotency import Key
from gateway.resumption.reader import EventId, RecordingReader, Responses
from gateway.resumption.recordings import Recordings
from gateway.tensor import Buffer

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
