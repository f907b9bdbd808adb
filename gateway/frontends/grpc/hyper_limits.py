"""What can one client make a connection on hyper's HTTP/2 hold, and how long does it keep the loop?

httpunk is hyper's HTTP/2 but for what is bounded here. Methods of its connection are overridden
that it does not promise to keep: its release is pinned, and tests would notice.
"""

from collections.abc import Callable
from typing import Any

from httpunk import H2ProtocolError, H2StreamError
from httpunk.h2 import connection as library
from httpunk.h2.server import ServerConnection, ServerRequest

from gateway.frontends.grpc.rpc import RpcError, StatusCode

TURN_BYTES = 16 << 10
"""So much of a connection is read before the others have their turn, and less if it is dense."""

LARGE_TURN_BYTES = 64 << 10
"""And so much once a large frame has begun, of which there is hardly more to do than to copy it."""

TURN_FRAMES = 64
"""About so many frames are served before the others have their turn."""

LARGE_HEADERS = 2 * TURN_BYTES
"""A block of headers of which so much came in turns of its own is too large."""

UNREAD_BYTES = 16 << 20
"""What methods leave unread of one connection needs no room that is shared."""

ENHANCE_YOUR_CALM = 11

FULL = "the server holds as much of messages that are not whole, or not taken, as it may"


class BufferBudget:
    """What messages on their way may take, whoever sends them."""

    def __init__(self, size_bytes: int) -> None:
        self._free = size_bytes

    def take(self, size: int) -> None:
        """Hold so many bytes more; RpcError if there is no room for them."""
        if size > self._free:
            raise RpcError(StatusCode.RESOURCE_EXHAUSTED, FULL)
        self._free -= size

    def give(self, size: int) -> None:
        """So many bytes are held no longer."""
        self._free += size


class BufferShare:
    """What one RPC, or one connection, has of the room."""

    def __init__(self, room: BufferBudget) -> None:
        self._room = room
        self.held = 0

    def add(self, size: int) -> None:
        """Hold so many bytes more; RpcError if there is no room for them."""
        self._room.take(size)
        self.held += size

    def change(self, size: int) -> None:
        """Hold so many bytes, instead of those before."""
        self.add(size - self.held)

    def clear(self) -> None:
        """Hold nothing."""
        if self.held:
            self._room.give(self.held)
            self.held = 0


def _acknowledgement() -> Any:
    codec = library.H2Codec("server")  # type: ignore[attr-defined] # it only imports the name
    codec.feed_preface(library.PREFACE)
    return codec.receive(bytes((0, 0, 0, 4, 1, 0, 0, 0, 0)))[0]


class BoundedConnection(ServerConnection):
    """One client's connection, within `room`.

    Our limits hold from the start, as hyper has it: not only once the client acknowledges them,
    which one that means harm does not. A request whose headers are so large that hyper has left
    some out is reset; to a client of gRPC that is RESOURCE_EXHAUSTED.
    """

    greeted = False
    """The client has sent its preface and its settings."""

    turn_bytes = TURN_BYTES
    """What to read next, at most."""

    _begun: list[Any]
    _has_left = False
    _acknowledged = False
    _unfinished = 0
    _oversized = 0

    def _on_request(self, st: Any, frame: Any, eof: bool) -> None:
        """Of the library's: a request has begun.

        It is handed over once what came with it has been read, and not by the queue of the
        library's, which would cost a turn of the loop.
        """
        self._begun.append(ServerRequest(st, self, frame))  # type: ignore[no-untyped-call]
        if eof:
            st.body_send.send(None)

    def maybe_goaway_reply(self) -> int:
        """Of the library's: all frames of a read have been served."""
        if self._begun:
            begun, self._begun = self._begun, []
            for request in begun:
                self._take(request)
                # Those that are reset before they are accepted are counted.
                self.accepted(request._stream.id)
        found: int = super().maybe_goaway_reply()
        return found

    def bound(self, room: BufferBudget, serve: Callable[[Any], None]) -> None:
        """What is unread comes out of the room; requests go to `serve`. Comes before reading."""
        self._share = BufferShare(room)
        self._take = serve
        self._begun = []

    async def start(self) -> None:
        """Of the library's: begin to read and to write."""
        await super().start()  # type: ignore[no-untyped-call]
        super().recv_settings(_acknowledgement())

    def recv_settings(self, frame: Any) -> tuple[bool, list[object], int]:
        """Of the library's: the client's settings, or its acknowledgement of ours."""
        if frame.ack and not self._acknowledged:
            self._acknowledged = True
            return False, [], 0
        self.greeted = True
        return super().recv_settings(frame)

    def receive(self, data: bytes) -> list[Any]:
        """Of the library's: the frames that end in these bytes."""
        self._require_room()
        frames = super().receive(data)
        if not frames:
            self._unfinished += len(data)
            if self._unfinished >= LARGE_HEADERS:  # of a large frame, whatever came before it
                self.turn_bytes = LARGE_TURN_BYTES
            return frames
        first: Any = frames[0]
        large = self._unfinished >= LARGE_HEADERS and hasattr(first, "end_headers")
        self._oversized = first.stream_id if large else 0
        self._unfinished = 0
        self.turn_bytes = min(TURN_BYTES, TURN_FRAMES * (1 + len(data) // len(frames)))
        return frames

    def recv_headers(self, frame: Any, spare: object | None = None) -> Any:
        """Of the library's: a request, or its trailers."""
        verdict = super().recv_headers(frame, spare)
        if frame.stream_id == self._oversized:
            raise H2StreamError(self._oversized, ENHANCE_YOUR_CALM, "library")
        return verdict

    def reset_on_error(self, sid: int, reason: int) -> Any:
        """Of the library's: a stream is reset for what its client did; its RPC is over as well."""
        verdict: Any = super().reset_on_error(sid, reason)
        if verdict.handle is not None:
            verdict.handle.reset_evt.set()
        return verdict

    def leave(self) -> None:
        """The connection is gone; what is still read of it takes no room."""
        self._has_left = True
        self._share.clear()

    def _require_room(self) -> None:
        if self._has_left:
            return
        unread = self._initial_connection_window_size - self.conn_recv_available
        try:
            self._share.change(max(0, unread - UNREAD_BYTES))
        except RpcError as error:
            raise H2ProtocolError(ENHANCE_YOUR_CALM, error.details) from None
