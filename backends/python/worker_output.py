"""Lines that a worker prints, in the log."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("sluice.python")

LINE_BYTES = 4096
"""Bytes of a line; longer lines are cut."""
LINES_PER_SECOND = 200
SECOND = 1.0
READ_BYTES = 64 << 10
BYTES_PER_PAUSE = 1 << 20
PAUSE_SECS = 0.05
"""Pause after BYTES_PER_PAUSE bytes: the pipe then blocks a model that prints without end."""


class LineLimit:
    """A limit of lines per second; further lines are counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = clock()
        self._lines = 0
        self.dropped = 0

    def allows(self) -> bool:
        """Whether one more line may be written now; if not, it counts as dropped."""
        if self._clock() - self._second >= SECOND:
            self._second, self._lines = self._clock(), 0
        self._lines += 1
        if self._lines <= LINES_PER_SECOND:
            return True
        self.dropped += 1
        return False

    def take_dropped(self) -> int:
        """The number of lines dropped since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped


class WorkerOutput:
    """Reads one pipe in one event loop without blocking; `close` reads the rest."""

    def __init__(self, pipe: int, about: Mapping[str, object]) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._about = about
        self._limit = LineLimit()
        self._rest = b""
        self._cut = False
        self._read_bytes = 0
        self._pause: asyncio.TimerHandle | None = None
        self._dropped_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._readable)

    def close(self) -> None:
        """Log the output so far, and close the pipe."""
        for timer in (self._pause, self._dropped_timer):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._pipe)
        self._read_bytes = 0
        while self._read_bytes < BYTES_PER_PAUSE and (data := self._read()):
            self._take(data)
        if self._rest:
            self._log(self._rest)
        self._log_dropped()
        os.close(self._pipe)

    def _readable(self) -> None:
        data = self._read()
        if data:
            self._take(data)
        if data == b"":  # all processes with the pipe have ended
            self._loop.remove_reader(self._pipe)
        elif self._read_bytes >= BYTES_PER_PAUSE:
            self._loop.remove_reader(self._pipe)
            self._pause = self._loop.call_later(PAUSE_SECS, self._resume)

    def _resume(self) -> None:
        self._pause, self._read_bytes = None, 0
        self._loop.add_reader(self._pipe, self._readable)

    def _read(self) -> bytes | None:
        """The bytes that have arrived; None if there are none now."""
        try:
            data = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return None
        self._read_bytes += len(data)
        return data

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._cut:
                self._log(line)
            self._cut = False
        if len(rest) > LINE_BYTES:
            if not self._cut:
                self._log(rest)
            rest, self._cut = b"", True
        self._rest = rest
        if self._limit.dropped and self._dropped_timer is None:
            self._dropped_timer = self._loop.call_later(SECOND, self._log_dropped)

    def _log(self, line: bytes) -> None:
        if self._limit.allows():
            text = line[:LINE_BYTES].decode(errors="replace").rstrip()
            log.info("printed: %s", text, extra=self._about)

    def _log_dropped(self) -> None:
        self._dropped_timer = None
        if count := self._limit.take_dropped():
            log.warning("output lines dropped", extra={**self._about, "lines_dropped": count})
