"""Comments in a stream of events that is silent, so that no proxy closes its connection."""

import asyncio
import math
from collections.abc import Callable

from gateway.frontends.http.request_scope import SendPiece, WritePiece

KEEP_ALIVE = b": keep-alive\n\n"
"""The comment that is sent in silence, so that no proxy closes the connection as idle."""


def silence_comment(model_at: float | None) -> bytes:
    """The comment of a request that waits for its model until that time, or of another one."""
    if model_at is None:
        return KEEP_ALIVE
    left = model_at - asyncio.get_running_loop().time()
    about = "" if math.isinf(left) else f", about {max(1, math.ceil(left))} s"
    return f": waiting for the model{about}\n\n".encode()


class SilenceFiller:
    """Sends a `comment` after each `secs` seconds of silence inside `with`, by a timer.

    `sent_at` is the time of the latest other output. A task exists only while a comment waits for
    a client that reads slowly.
    """

    __slots__ = ("_comment", "_loop", "_put", "_secs", "_sent_at", "_task", "_timer", "_write")

    def __init__(
        self,
        put: SendPiece,
        write: WritePiece | None,
        secs: float,
        sent_at: Callable[[], float],
        comment: Callable[[], bytes],
    ) -> None:
        self._comment = comment
        self._loop = asyncio.get_running_loop()
        self._put = put
        self._write = write
        self._secs = secs
        self._sent_at = sent_at
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle

    def __enter__(self) -> None:
        self._look_in(self._secs)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _look_in(self, secs: float) -> None:
        self._timer = self._loop.call_later(secs, self._look)

    def _look(self) -> None:
        left = self._sent_at() + self._secs - self._loop.time()
        if left > 0:
            self._look_in(left)
            return
        comment = self._comment()
        if self._write is not None and self._write(comment):
            self._look_in(self._secs)
        else:
            self._task = asyncio.ensure_future(self._put(comment))
            self._task.add_done_callback(self._put_ended)

    def _put_ended(self, task: "asyncio.Task[None]") -> None:
        """Continue after a comment; a failure to send ends the comments, then the stream."""
        failed = task.cancelled() or task.exception() is not None
        if task is self._task and not failed:
            self._task = None
            self._look_in(self._secs)
