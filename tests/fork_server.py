"""A process that has imported what a server imports at its start, and forks servers.

A start takes a tenth of the processor time so; the rest of a start is imports. Frontends, workers
and engines of these servers are forks, too (`tests/child_forks.py`). Another such process has
imported vLLM.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from tests.child_forks import MESSAGE_BYTES, fork_children
from tests.child_forks import ROOT as ROOT

PRELOADED = (
    "gateway.cli",
    "gateway.observability.log",
    "uvloop",
    "gateway.server",
    "gateway.listeners",
)
"""Modules that every server imports by `importlib` at its start; they import the others."""
ENGINES = "tests.backends.vllm.engine_forks"
"""The module that imports vLLM."""
SPACE = " " * 200
"""An argument in whose place the command lines of children stand."""


class ForkedProcess:
    """A forked server; the members are those of `subprocess.Popen`.

    Variables of its environment that the loader or the interpreter reads at its start have no
    effect, but for PYTHONPATH.
    """

    def __init__(self, args: Sequence[str], output: int, status: socket.socket) -> None:
        self.args = args
        self.stdout = os.fdopen(output, errors="replace")
        self.returncode: int | None = None
        self._status = status
        self.pid = int(status.recv(MESSAGE_BYTES))

    def poll(self) -> int | None:
        """The exit status, if the process has ended."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; TimeoutExpired if the process does not end in time."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(MESSAGE_BYTES))
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fresh(args: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `python -m gateway` as users do."""
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=dict(environment),
    )


def forked(args: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
    """Start the same as a fork."""
    return _fork_server().start(args, environment)


def forked_with_engines(args: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
    """Start the same as a fork of a process that has imported vLLM."""
    return _fork_server(ENGINES).start(args, environment)


class ForkServer:
    """The client of the process that forks."""

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), SPACE, *modules],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )

    def start(self, args: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Run `python -m gateway` with these arguments; its output is one pipe."""
        output, written = os.pipe()
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = json.dumps([args, dict(environment)]).encode()
        with theirs:
            socket.send_fds(self._socket, [message], [written, theirs.fileno()])
        os.close(written)
        return ForkedProcess(args, output, status)

    def close(self) -> None:
        """End the process; servers that it has forked run on."""
        self._socket.close()
        self._process.wait()


@cache
def _fork_server(*modules: str) -> ForkServer:
    """The one of this process."""
    found = ForkServer(*modules)
    atexit.register(found.close)
    return found


def preload() -> None:
    """Import what a server imports at its start, and exclude it from garbage collection."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()


def main() -> None:
    """Fork a server for each message."""
    for module in sys.argv[3:]:
        importlib.import_module(module).preload()
    preload()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, files, *_ = socket.recv_fds(requests, MESSAGE_BYTES, 2)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _watch_server(files[1], *json.loads(message), output=files[0])
            return
        for each in files:
            os.close(each)


def _watch_server(
    status: int, args: Sequence[str], environment: Mapping[str, str], output: int
) -> None:
    """Fork the server, and report its process id and its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _serve(args, environment, output)
        return
    os.close(output)
    os.write(status, str(pid).encode())
    _, code = os.waitpid(pid, 0)
    os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
    os._exit(0)


def _serve(args: Sequence[str], environment: Mapping[str, str], output: int) -> None:
    """Become `python -m gateway`."""
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, descriptor)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    searched = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [each for each in searched if each and each not in sys.path]
    sys.argv[1:] = args
    fork_children()
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
