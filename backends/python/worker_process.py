"""The process of a worker: start and end, printed lines in the log, health checks."""

import asyncio
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backends.python.codec import to_json
from backends.python.connection import FrameSocket
from backends.python.worker.sluice_worker.protocol import ToWorker
from gateway.errors import Code, InferenceError

ENTRY = Path(__file__).parent / "worker"

log = logging.getLogger("sluice.python")

LINE_BYTES = 4096
"""Bytes of a line; longer lines are cut."""
LINES_PER_SECOND = 200
SECOND = 1.0
READ_BYTES = 64 << 10
BYTES_PER_PAUSE = 1 << 20
PAUSE_SECS = 0.05
"""Pause after BYTES_PER_PAUSE bytes: the pipe then blocks a model that prints without end."""

MISSED = 3
READY_SECS = 5.0


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A started process, and the gateway's ends of its three sockets and one pipe."""

    process: subprocess.Popen[bytes]
    work: socket.socket
    control: socket.socket
    descriptors: socket.socket
    output: int

    @classmethod
    def start(cls, python: Path, variables: Mapping[str, str]) -> "WorkerProcess":
        """Start a worker in a session of its own; it ends when `control` is closed.

        `variables` are added to the environment. Blocks for milliseconds; OSError says why it
        cannot be started. Descriptors of both ends are closed then.
        """
        pairs = [socket.socketpair() for _ in range(3)]
        readable, writable = os.pipe()
        theirs = [pair[1].fileno() for pair in pairs]
        try:
            process = subprocess.Popen(
                [python, ENTRY, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=writable,
                stderr=subprocess.STDOUT,
                pass_fds=theirs,
                start_new_session=True,
                env={**os.environ, **variables},
            )
        except OSError:
            _close(pairs, 0, readable)
            raise
        finally:
            _close(pairs, 1, writable)
        work, control, descriptors = (pair[0] for pair in pairs)
        return cls(process, work, control, descriptors, readable)

    def limit_memory(self, megabytes: int) -> None:
        """Limit its private memory (RLIMIT_DATA); shared memory does not count."""
        limit = megabytes << 20
        resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (limit, limit))

    def keep_to(self, cores: frozenset[int]) -> None:
        """Bind all of its threads to these CPU cores, if any."""
        if not cores:
            return
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for thread in os.listdir(f"/proc/{self.process.pid}/task"):
                os.sched_setaffinity(int(thread), cores)

    def kill(self) -> None:
        """Kill it and all that it has started; no effect if it has ended."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Kill it, wait for its end and close its sockets and pipe."""
        self.kill()
        self.process.wait()
        for each in (self.work, self.control, self.descriptors):
            each.close()
        os.close(self.output)


def _close(pairs: list[tuple[socket.socket, socket.socket]], end: int, descriptor: int) -> None:
    for pair in pairs:
        pair[end].close()
    os.close(descriptor)


def watch_exit(worker: WorkerProcess, on_exit: Callable[[int], None]) -> None:
    """Call back with its status when it has ended; its remaining processes are killed."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        worker.kill()  # before it is reaped its process id is not used again
        on_exit(worker.process.wait())

    try:
        descriptor = os.pidfd_open(worker.process.pid)
    except (AttributeError, OSError):  # not Linux, or an old one
        _watch_by_thread(worker, loop, ended)
        return

    def readable() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended()

    loop.add_reader(descriptor, readable)


def _watch_by_thread(
    worker: WorkerProcess, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]
) -> None:
    def wait() -> None:
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(ended)

    threading.Thread(target=wait, name="await-worker", daemon=True).start()


def describe_exit(status: int) -> str:
    """The text for the exit status of a worker."""
    if status >= 0:
        return f"it ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    hint = ", perhaps because the machine is out of memory" if name == "SIGKILL" else ""
    return f"it was ended by {name}{hint}"


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


class Pulse:
    """Pings a worker every `interval_secs` (0: never), until `stop`.

    `on_silence` is called after three unanswered pings in a row. `started` is done at the first
    answer.
    """

    def __init__(self, control: FrameSocket, on_silence: Callable[[], None]) -> None:
        self._control = control
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self._interval_secs = 0.0
        self._asked = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ask()

    def every(self, interval_secs: float) -> None:
        """Start the pings."""
        self._interval_secs = interval_secs
        if interval_secs:
            self._await_beat()

    def answered(self) -> None:
        """PONG."""
        self._asked = 0
        if not self.started.done():
            self.started.set_result(None)

    def stop(self) -> None:
        """Stop the pings."""
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if self._asked >= MISSED:
            self._on_silence()
            return
        self._ask()
        self._await_beat()

    def _await_beat(self) -> None:
        """Set the timer: the loop wakes once for all workers with the same interval."""
        left = self._interval_secs - self._loop.time() % self._interval_secs
        if left < self._interval_secs / 2:
            left += self._interval_secs
        self._timer = self._loop.call_later(left, self._beat)

    def _ask(self) -> None:
        self._asked += 1
        self._control.send(to_json([ToWorker.PING, self._asked]))


class Readiness:
    """Calls a model's own `is_ready` (python backend, is_ready); concurrent checks share a call."""

    def __init__(self, control: FrameSocket, instance: str) -> None:
        self._control = control
        self._instance = instance
        self._calls = 0
        self._asking: asyncio.Future[tuple[bool | None, str | None]] | None = None

    async def check(self) -> None:
        """Raise InferenceError unless the model is ready."""
        shared = self._asking is not None
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_future()
            self._calls += 1
            self._control.send(to_json([ToWorker.IS_READY, self._calls]))
        try:
            async with asyncio.timeout(READY_SECS):
                ready, error = await asyncio.shield(self._asking)
        except TimeoutError:
            which = "in-flight is_ready()" if shared else "user-defined is_ready()"
            raise InferenceError(
                Code.UNAVAILABLE, f"Timed out waiting for {which} response"
            ) from None
        if error is not None:
            raise InferenceError(Code.INTERNAL, error)
        if not ready:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"Model '{self._instance}' is not ready (user-defined check failed).",
            )

    def answered(self, call: int, ready: bool | None, error: str | None) -> None:
        """READY."""
        if self._asking is not None and call == self._calls:
            self._asking.set_result((ready, error))
            self._asking = None

    def end(self, why: str) -> None:
        """End the pending check: the worker has ended."""
        if self._asking is not None:
            self._asking.set_result((None, why))
            self._asking = None
