"""Child processes that are forks: frontends, workers of the Python backend, and those of engines.

A process that their parent has forked forks them, as it was then and with one thread, and their
parent adopts them: a process whose parent has ended is a child of the next ancestor that is a
subreaper.
"""

import ctypes
import fcntl
import gc
import inspect
import json
import logging
import multiprocessing.util
import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Never

ROOT = Path(__file__).parent.parent
WORKER = str(ROOT / "backends" / "python" / "worker")
FRONTEND = ("-P", "-m", "gateway.processes")
CLIENT = ("-P", "-m", "backends.vllm.engine_clients")
SPAWNED = "--multiprocessing-fork"
"""The last argument of a process that multiprocessing spawns."""
MESSAGE_BYTES = 1 << 20
MOST_FILES = 32
STANDARD = (0, 1, 2)
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
SPAWN = multiprocessing.util.spawnv_passfds
EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # noqa: SLF001
PR_SET_CHILD_SUBREAPER = 36
ADOPTION_SECS = 0.0005
"""Between two looks for the parent that adopts a process."""


class Child(NamedTuple):
    """A child process, but for its files."""

    args: Sequence[str]
    environment: dict[str, str]
    new_session: bool
    descriptors: Sequence[int]
    cores: Sequence[int]


class ChildForks:
    """The client of the process that forks."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._pid = os.fork()
        if self._pid == 0:
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

    def spawn(self, path: bytes, command: Sequence[Any], descriptors: Sequence[int]) -> int:
        """The same in place of `multiprocessing.util.spawnv_passfds`."""
        args = [os.fsdecode(each) for each in command]
        if _program(args) is None:
            return SPAWN(path, command, descriptors)
        files = [*STANDARD, *map(int, descriptors)]
        child = Child(args, dict(os.environ), False, files, cores_of_thread())
        return self.start(child, files)

    def close(self) -> None:
        """End the process; its forks run on."""
        self._requests.close()
        os.waitpid(self._pid, 0)


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
        session, descriptors = bound["start_new_session"], [*STANDARD, *passed]
        child = Child(args, dict(bound["env"]), session, descriptors, cores_of_thread())
        self.pid = self.forks.start(child, [*standard, *passed])
        self._child_created = True
        self._close_pipe_fds(*(bound[each] for each in PIPES))


def cores_of_thread() -> Sequence[int]:
    """The cores of this thread, which its children inherit."""
    return sorted(os.sched_getaffinity(0))


def fork_children() -> ChildForks:
    """Have this process fork these children from now on."""
    ForkingPopen.forks = forks = ChildForks()
    subprocess.Popen = ForkingPopen
    multiprocessing.util.spawnv_passfds = forks.spawn
    return forks


def _program(args: Sequence[str]) -> tuple[Callable[[], object], Sequence[str]] | None:
    """The program of a command and its arguments; None for other commands."""
    python, *rest = args
    if python != sys.executable:
        return None
    if tuple(rest[:3]) == FRONTEND:
        return partial(_run_module, FRONTEND[-1]), rest[3:]
    if tuple(rest[:3]) == CLIENT:
        return _run_client, rest[3:]
    if rest[:1] == [WORKER]:
        return partial(runpy.run_path, WORKER, run_name="__main__"), rest[1:]
    if rest[-1:] == [SPAWNED]:
        return partial(exec, rest[-2], {}), rest[-1:]
    return None


def _run_module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_client() -> None:
    """Become the client of an engine; metrics have the values that its environment asks for."""
    if values := sys.modules.get("prometheus_client.values"):
        vars(values)["ValueClass"] = values.get_value_class()
    _run_module(CLIENT[-1])


def _end_after(run: Callable[[], object]) -> Never:
    """Run a program, and do nothing that the process that was forked would do at its end.

    An exception would have pytest report each of its tests as failed, in the fork.
    """
    code: Any = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - of any program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else bool(code))


def _adopt(orphans: bool) -> None:
    """Whether descendants whose parent ends become children of this process."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


def _serve(requests: socket.socket) -> None:
    """Fork for each message, until the parent has ended."""
    # Objects of the parent that end would close files of a fork under their numbers.
    gc.freeze()
    logging.shutdown()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, files, *_ = socket.recv_fds(requests, MESSAGE_BYTES, MOST_FILES)
        if not message:
            os._exit(0)
        readable, writable = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                while os.getppid() == parent:
                    time.sleep(ADOPTION_SECS)
                _become(Child(*json.loads(message)), files)
            os.write(writable, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(readable, MESSAGE_BYTES))
        for each in (readable, writable, *files):
            os.close(each)


def _become(child: Child, files: Sequence[int]) -> Never:
    """Run the child's program, and end."""
    if child.new_session:
        os.setsid()
    os.sched_setaffinity(0, child.cores)
    _arrange(files, child.descriptors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(child.environment)
    searched = child.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*filter(None, searched), *sys.path[1:]])
    program = _program(child.args)
    assert program is not None
    run, sys.argv[1:] = program
    if child.args[-1] == SPAWNED:
        fork_children()
    _show(child.args)
    _end_after(run)


def _show(command: Sequence[str]) -> None:
    """Have the system tell this command line, as far as that of this process had space."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = "\0".join(command).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


def _arrange(files: Sequence[int], descriptors: Sequence[int]) -> None:
    """Leave nothing open that others wait for but these, under these numbers.

    The numbers of others stay taken: objects that have them may yet use them.
    """
    least = max(*files, *descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, least) for each in files]
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in moved and _is_awaited(each):
            os.dup2(nothing, each)
    os.close(nothing)
    for each, wanted in zip(moved, descriptors, strict=True):
        os.dup2(each, wanted)
        os.close(each)


def _is_awaited(descriptor: int) -> bool:
    """Whether other processes may wait for events of this one: a socket, pipe, selector or such."""
    with suppress(OSError):
        mode = os.fstat(descriptor).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISCHR(mode))
    return False
