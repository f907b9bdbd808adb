"""The replicas of a router under soak: processes that are killed and started again."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from loadtests.support.servers import ServerFailed, free_ports, tail

ROOT = Path(__file__).parents[2]
FLAGS = ("--rate-limit=execution_count", "--model-load-thread-count=8", "--exit-timeout-secs=5")
START_SECS = 120.0
STOP_SECS = 40.0
POLL_SECS = 0.05
READY = re.compile(r"^\s+fleet\s+\S+:\d+\s*$", re.MULTILINE)
"""The line of a log after all models are ready."""


class Replicas:
    """Replicas of every model of a repository, with a log each in `folder`."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self._folder = folder
        self._repository = repository
        ports = free_ports()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}
        self._killed: list[str] = []
        """The lines that killed replicas have logged before."""
        for port in (ports.http, ports.grpc):
            self._start(port)

    @property
    def flags(self) -> Sequence[str]:
        """The flags of their router."""
        return ["--fleet=static:" + ",".join(f"127.0.0.1:{port}" for port in self._processes)]

    @property
    def processes(self) -> Mapping[int, subprocess.Popen[bytes]]:
        """The running ones by port."""
        return self._processes

    @property
    def are_ready(self) -> bool:
        """Each has every model."""
        return all(READY.search(_text(log)) for log in self._logs.values())

    @property
    def lines(self) -> Sequence[str]:
        """The lines of all logs until now, those of killed replicas until their kill."""
        return [*self._killed, *(line for log in self._logs.values() for line in _lines(log))]

    def dump(self, port: int) -> Path:
        """The file for the dump of one."""
        return self._folder / f"dump-{port}"

    def wait_ready(self) -> None:
        """Wait until each has every model; ServerFailed if one has ended."""
        deadline = time.monotonic() + START_SECS
        while not self.are_ready:
            for port, process in self._processes.items():
                if process.poll() is not None or time.monotonic() > deadline:
                    log = tail(self._logs[port])
                    raise ServerFailed(f"the replica at port {port} does not start\n{log}")
            time.sleep(POLL_SECS)

    def restart_one(self, chance: random.Random) -> None:
        """Kill a replica, and start another one at its port."""
        port = chance.choice(list(self._processes))
        self._killed += _lines(self._logs[port])
        self._kill(port)
        self._start(port)

    def stop(self) -> Sequence[str]:
        """End them once they are ready; those that do not end as they should, in words."""
        self.wait_ready()
        for process in self._processes.values():
            process.terminate()
        found = []
        for port, process in self._processes.items():
            try:
                status = process.wait(STOP_SECS)
            except subprocess.TimeoutExpired:
                found.append(f"a replica did not end within {STOP_SECS:g} s of SIGTERM")
            else:
                lines = "\n".join(tail(self._logs[port]).splitlines()[-1:])
                found += [f"a replica ended with status {status}: {lines}"] if status else []
        return found

    def kill(self) -> None:
        """Kill those that still run."""
        for port in self._processes:
            self._kill(port)

    def _kill(self, port: int) -> None:
        process = self._processes[port]
        # Its workers are in its session; it may have ended.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self, port: int) -> None:
        temporary = self._folder / f"temporary-{port}"
        temporary.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "loadtests.soak.inside", str(self.dump(port))),
            *("replica", "*", *FLAGS),
            *(f"--model-repository={self._repository}", f"--fleet-port={port}"),
        ]
        self._logs[port] = self._folder / f"replica-{port}.log"
        with self._logs[port].open("wb") as log:
            self._processes[port] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {"TMPDIR": str(temporary)},
                start_new_session=True,
            )


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _lines(log: Path) -> Sequence[str]:
    return _text(log).splitlines()
