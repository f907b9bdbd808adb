"""Limits of memory and of time on the event loop for connections on hyper's HTTP/2.

The overridden methods of httpunk are private: its release is pinned, and tests fail if they change.
"""

from collections.abc import Callable
from typing import Any

from httpunk import H2ProtocolError, H2StreamError
from httpunk.h2 import connection as library
from httpunk.h2.server import ServerConnection, ServerRequest

from gateway.frontends.grpc.rpc import RpcError, StatusCode

TURN_BYTES = 16 << 10
"""Maximum read of one connection per turn of the event loop; less for small frames."""

LARGE_TURN_BYTES = 64 << 10
"""Maximum read within a large frame, which is only copied."""

TURN_FRAMES = 64
"""Approximate maximum of frames of one connection per turn of the event loop."""

LARGE_HEADERS = 2 * TURN_BYTES
"""Size from which an incomplete block of headers is too large."""

UNREAD_BYTES = 16 << 20
"""Unread data of one connection that does not count towards the budget."""

ENHANCE_YOUR_CALM = 11

FULL = "the server's buffers for incomplete and unsent messages are full"


class BufferBudget:
    """Memory for incomplete and unsent messages of all connections, in bytes."""

    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes

    def reserve(self, size: int) -> None:
        """Reserve bytes; RpcError RESOURCE_EXHAUSTED if the budget is used up."""
        if size > self._free:
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, FULL)
        self._free -= size

    def release(self, size: int) -> None:
        """Return reserved bytes."""
        self._free += size


class BufferShare:
    """The bytes that one RPC or one connection has reserved."""

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self.reserved = 0

    def add(self, size: int) -> None:
        """Reserve bytes; RpcError RESOURCE_EXHAUSTED if the budget is used up."""
        self._budget.reserve(size)
        self.reserved += size

    def change(self, size: int) -> None:
        """Reserve this number of bytes in place of the earlier reservation."""
        self.add(size - self.reserved)

    def clear(self) -> None:
        """Return all reserved bytes."""
        if self.reserved:
            self._budget.release(self.reserved)
            self.reserved = 0


def _acknowledgement() -> Any:
    codec = library.H2Codec("server")  # type: ignore[attr-defined] # it only imports the name
    codec.feed_preface(library.PREFACE)
    return codec.receive(bytes((0, 0, 0, 4, 1, 0, 0, 0, 0)))[0]


class BoundedConnection(ServerConnection):
    """One connection whose unread data count towards the budget.

    The limits apply from the start, also if the client never acknowledges them. A request is reset
    if its headers exceed the limit of hyper; gRPC clients report RESOURCE_EXHAUSTED.
    """

    greeted = False
    """Whether the client has sent its preface and its settings."""

    turn_bytes = TURN_BYTES
    """Maximum of the next read, in bytes."""

    _begun: list[Any]
    _is_closed = False
    _acknowledged = False
    _unfinished = 0
    _oversized = 0

    def _on_request(self, st: Any, frame: Any, eof: bool) -> None:
        """Override of httpunk: a request has started.

        It is served after all frames of the same read, without the queue of httpunk, which would
        cost a turn of the event loop.
        """
        self._begun.append(ServerRequest(st, self, frame))  # type: ignore[no-untyped-call]
        if eof:
            st.body_send.send(None)

    def maybe_goaway_reply(self) -> int:
        """Override of httpunk: all frames of a read are handled."""
        if self._begun:
            begun, self._begun = self._begun, []
            for request in begun:
                self._serve_request(request)
                # Requests that are reset before they are accepted count as a flood.
                self.accepted(request._stream.id)
        found: int = super().maybe_goaway_reply()
        return found

    def bound(self, budget: BufferBudget, serve: Callable[[Any], None]) -> None:
        """Count unread data towards `budget`, and pass requests to `serve`; call before reading."""
        self._share = BufferShare(budget)
        self._serve_request = serve
        self._begun = []

    async def start(self) -> None:
        """Override of httpunk: start to read and to write."""
        await super().start()  # type: ignore[no-untyped-call]
        super().recv_settings(_acknowledgement())

    def recv_settings(self, frame: Any) -> tuple[bool, list[object], int]:
        """Override of httpunk: the settings of the client, or its acknowledgement of ours."""
        if frame.ack and not self._acknowledged:
            self._acknowledged = True
            return False, [], 0
        self.greeted = True
        return super().recv_settings(frame)

    def receive(self, data: bytes) -> list[Any]:
        """Override of httpunk: the frames completed by these bytes."""
        self._reserve_unread()
        frames = super().receive(data)
        if not frames:
            self._unfinished += len(data)
            if self._unfinished >= LARGE_HEADERS:  # within a large frame
                self.turn_bytes = LARGE_TURN_BYTES
            return frames
        first: Any = frames[0]
        large = self._unfinished >= LARGE_HEADERS and hasattr(first, "end_headers")
        self._oversized = first.stream_id if large else 0
        self._unfinished = 0
        self.turn_bytes = min(TURN_BYTES, TURN_FRAMES * (1 + len(data) // len(frames)))
        return frames

    def recv_headers(self, frame: Any, spare: object | None = None) -> Any:
        """Override of httpunk: the headers or trailers of a request."""
        verdict = super().recv_headers(frame, spare)
        if frame.stream_id == self._oversized:
            raise H2StreamError(self._oversized, ENHANCE_YOUR_CALM, "library")
        return verdict

    def reset_on_error(self, sid: int, reason: int) -> Any:
        """Override of httpunk: reset a stream after a protocol error, and end its RPC."""
        verdict: Any = super().reset_on_error(sid, reason)
        if verdict.handle is not None:
            verdict.handle.reset_evt.set()
        return verdict

    def close_budget(self) -> None:
        """Return all reserved bytes after a disconnect, and reserve no more."""
        self._is_closed = True
        self._share.clear()

    def _reserve_unread(self) -> None:
        if self._is_closed:
            return
        unread = self._initial_connection_window_size - self.conn_recv_available
        try:
            self._share.change(max(0, unread - UNREAD_BYTES))
        except RpcError as error:
            raise H2ProtocolError(ENHANCE_YOUR_CALM, error.details) from None
