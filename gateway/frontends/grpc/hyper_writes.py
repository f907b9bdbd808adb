"""Messages on hyper's HTTP/2 that are sent without waiting, and so without a task."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from httpunk import HTTPunkError

from gateway.frontends.grpc.http2_wire import framed

MOST_BYTES = 64 << 10
"""Larger messages count towards a budget."""
UNSENT_BYTES = 256 << 10
"""Unsent data of a stream from which messages have to wait; httpunk keeps a MiB of each."""


def send_at_once(request: Any, messages: Sequence[bytes]) -> bool:
    """Send messages of an answer; False, and none is sent, if they have to wait.

    That is so before its headers, while the client does not read or its windows are too small, and
    after a reset.
    """
    connection, stream = request._conn, request._stream
    (body, *rest) = framed(messages)
    if rest or not _has_room(connection, stream.id, len(body)):
        return False
    send = partial(connection._try_send_data, stream, body, 0, False)
    try:
        connection.send_together(send, own=1)
    except HTTPunkError:
        return False
    return True


def _has_room(connection: Any, stream_id: int, size: int) -> bool:
    """Whether a stream takes data of a size in one step."""
    window = connection.stream_send_window(stream_id)
    if window is None or size > min(window, connection.conn_send_window, MOST_BYTES):
        return False
    found: bool = connection.stream_send_buffered(stream_id) < UNSENT_BYTES
    return found
