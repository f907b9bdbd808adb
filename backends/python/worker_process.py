"""Start, limits and end of a worker's process."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ENTRY = Path(__file__).parent / "worker"


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
