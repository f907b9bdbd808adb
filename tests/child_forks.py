"""Child processes of a forked server that are forks, too: frontends, workers of the Python backend.

A process that the server has forked at its start forks them, and the server is their parent: a
process whose parent has ended is a child of the next ancestor that is a subreaper.
"""

import ctypes
import fcntl
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).parent.parent
WORKER = str(ROOT / "backends" / "python" / "worker")
FRONTEND = ("-P", "-m", "gateway.processes")
MESSAGE_BYTES = 1 << 20
MOST_FILES = 32
STANDARD = (0, 1, 2)
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # noqa: SLF001
PR_SET_CHILD_SUBREAPER = 36


class Child(NamedTuple):
    """A child process, but for its files."""

    args: Sequence[str]
    environment: dict[str, str]
    new_session: bool
    descriptors: Sequence[int]


class ChildForks:
    """The client of the process that forks."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        if os.fork() == 0:
            self._requests.close()
            _serve(theirs)
        theirs.close()

    def start(self, child: Child, files: Sequence[int]) -> int:
        """Fork a child of this process with these files as its descriptors; its process id."""
        with self._lock:
            _adopt(True)
            socket.send_fds(self._requests, [json.dumps(child).encode()], files)
            pid = int(self._requests.recv(MESSAGE_BYTES))
            _adopt(False)
        return pid


class ForkingPopen(subprocess.Popen[bytes]):
    """`Popen` whose process is a fork, if its command is one of these."""

    forks: ClassVar[ChildForks]

    def _execute_child(self, *given: Any) -> None:
        bound = EXECUTE.bind(self, *given).arguments
        args = [str(each) for each in bound["args"]]
        if _program(args) is None:
            super()._execute_child(*given)
            return
        ends = [bound[each] for each in ("p2cread", "c2pwrite", "errwrite")]
        standard = [own if end == -1 else end for own, end in zip(STANDARD, ends, strict=True)]
        passed = [int(each) for each in bound["pass_fds"]]
        child = Child(args, dict(bound["env"]), bound["start_new_session"], [*STANDARD, *passed])
        self.pid = self.forks.start(child, [*standard, *passed])
        self._child_created = True
        self._close_pipe_fds(*(bound[each] for each in PIPES))


def fork_children() -> None:
    """Have this process fork these children from now on."""
    ForkingPopen.forks = ChildForks()
    subprocess.Popen = ForkingPopen


def _program(args: Sequence[str]) -> tuple[Callable[[], object], Sequence[str]] | None:
    """The program of a command and its arguments; None for other commands."""
    python, *rest = args
    if python == sys.executable and tuple(rest[:3]) == FRONTEND:
        module = partial(runpy.run_module, FRONTEND[-1], run_name="__main__", alter_sys=True)
        return module, rest[3:]
    if python == sys.executable and rest[:1] == [WORKER]:
        return partial(runpy.run_path, WORKER, run_name="__main__"), rest[1:]
    return None


def _adopt(orphans: bool) -> None:
    """Whether descendants whose parent ends become children of this process."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


def _serve(requests: socket.socket) -> None:
    """Fork for each message, until the server has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, files, *_ = socket.recv_fds(requests, MESSAGE_BYTES, MOST_FILES)
        if not message:
            os._exit(0)
        readable, writable = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                _become(Child(*json.loads(message)), files)
            os.write(writable, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(readable, MESSAGE_BYTES))
        for each in (readable, writable, *files):
            os.close(each)


def _become(child: Child, files: Sequence[int]) -> None:
    """Run the child's program, and end."""
    if child.new_session:
        os.setsid()
    _arrange(files, child.descriptors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(child.environment)
    searched = child.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*filter(None, searched), *sys.path[1:]])
    program = _program(child.args)
    assert program is not None
    run, sys.argv[1:] = program
    _show(child.args)
    run()
    sys.exit()


def _show(command: Sequence[str]) -> None:
    """Have the system tell this command line, as far as that of this process had space."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = "\0".join(command).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


def _arrange(files: Sequence[int], descriptors: Sequence[int]) -> None:
    """Leave no files open but these, under these numbers."""
    least = max(*files, *descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, least) for each in files]
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in moved:
            with suppress(OSError):
                os.close(each)
    for each, wanted in zip(moved, descriptors, strict=True):
        os.dup2(each, wanted)
        os.close(each)
