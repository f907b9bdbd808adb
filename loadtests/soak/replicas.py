"""The replicas of a router under soak: processes that are killed and started again."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from loadtests.support.servers import ServerFailed, free_ports, tail

ROOT = Path(__file__).parents[2]
FLAGS = ("--rate-limit=execution_count", "--model-load-thread-count=8", "--exit-timeout-secs=5")
START_SECS = 120.0
STOP_SECS = 40.0
POLL_SECS = 0.05
LISTENING = "listening for=fleet "


class Replicas:
    """Replicas of every model of a repository, with a log each in `folder`."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self._folder = folder
        self._repository = repository
        self._numbers = count(1)
        ports = free_ports()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}
        for port in (ports.http, ports.grpc):
            self._start(port)

    @property
    def flags(self) -> Sequence[str]:
        """The flags of their router."""
        return ["--fleet=static:" + ",".join(f"127.0.0.1:{port}" for port in self._processes)]

    def wait_ready(self) -> None:
        """Wait until routers can connect; ServerFailed if one has ended."""
        deadline = time.monotonic() + START_SECS
        for port, process in self._processes.items():
            log = self._logs[port]
            while LISTENING not in log.read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerFailed(f"the replica at port {port} does not start\n{tail(log)}")
                time.sleep(POLL_SECS)

    def restart_one(self, chance: random.Random) -> None:
        """Kill a replica, and start another one at its port."""
        port = chance.choice(list(self._processes))
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
            *(sys.executable, "-m", "gateway", "replica", "*", *FLAGS),
            *(f"--model-repository={self._repository}", f"--fleet-port={port}"),
        ]
        self._logs[port] = self._folder / f"replica-{next(self._numbers)}.log"
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
