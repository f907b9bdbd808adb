"""A `sluice serve` process of its own, on free ports, for tests that drive it from outside."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx

START_SECS = 120.0
STOP_SECS = 30.0
FRONTENDS = re.compile(r"^\s*(http|grpc|metrics)\s+(?:http://)?localhost:(\d+)\s*$")


class Serving:
    """A running server; `log` holds what it has written so far."""

    def __init__(self, repository: Path, flags: Sequence[str] = ()) -> None:
        self.log: list[str] = []
        self.ports: dict[str, int] = {}
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway", "serve", f"--model-repository={repository}"),
                *("--http-port=0", "--grpc-port=0", "--metrics-port=0"),
                *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1"),
                *flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def http(self) -> str:
        """The base URL of the HTTP frontend."""
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def grpc(self) -> str:
        """The target of the gRPC frontend."""
        return f"127.0.0.1:{self.ports['grpc']}"

    @property
    def text(self) -> str:
        """All it has written so far."""
        return "\n".join(self.log)

    def wait_ready(self) -> Self:
        """Wait for the lines that name the ports."""
        if not self._ready.wait(START_SECS) or len(self.ports) < len(("http", "grpc", "metrics")):
            self.stop()
            raise AssertionError(f"the server did not start:\n{self.text}")
        return self

    def metrics(self) -> dict[str, float]:
        """Every sample of the metrics page: `name{labels}` to value."""
        page = httpx.get(f"http://127.0.0.1:{self.ports['metrics']}/metrics").text
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join(STOP_SECS)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                if found := FRONTENDS.match(line):
                    self.ports[found[1]] = int(found[2])
                if len(self.ports) == len(("http", "grpc", "metrics")):
                    self._ready.set()
        self._ready.set()


@contextmanager
def serving(repository: Path, *flags: str) -> Iterator[Serving]:
    """A ready server for the length of the block."""
    server = Serving(repository, flags)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def write_model(repository: Path, name: str, config: str) -> None:
    """Add a model with an empty version 1 to a repository."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
