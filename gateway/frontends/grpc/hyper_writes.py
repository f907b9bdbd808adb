"""Messages on hyper's HTTP/2 that are sent without waiting, and so without a task."""

from collections.abc import Sequence
from typing import Any

from httpunk import HTTPunkError

from gateway.frontends.grpc.http2_wire import framed

INTERNAL_ERROR = 2
MOST_BYTES = 64 << 10
"""Larger messages count towards a budget."""
UNSENT_BYTES = 256 << 10
"""Unsent data of a stream from which messages have to wait; httpunk keeps a MiB of each."""


def send_at_once(request: Any, messages: Sequence[bytes]) -> bool:
    """Send messages of an answer; False, and none is sent, if they have to wait: `send` them then.

    That is so before its headers, while the client does not read or its windows are too small,
    while another stream is the first in the line for the window of the connection, in which this
    one has its place then, and after a reset.
    """
    connection, stream = request._conn, request._stream
    (body, *rest) = framed(messages)
    if rest or not _has_room(connection, stream.id, len(body)):
        return False
    left: list[int | None] = []
    try:
        connection.send_together(
            lambda: left.append(connection._try_send_data(stream, body, 0, False)), own=1
        )
    except HTTPunkError:
        return False
    if left[0]:
        connection._reset(stream, INTERNAL_ERROR)  # a part of a message cannot be taken back
    return left[0] is None


def _has_room(connection: Any, stream_id: int, size: int) -> bool:
    """Whether a stream takes data of a size in one step."""
    window = connection.stream_send_window(stream_id)
    if window is None or size > min(window, connection.conn_send_window, MOST_BYTES):
        return False
    found: bool = connection.stream_send_buffered(stream_id) < UNSENT_BYTES
    return found
