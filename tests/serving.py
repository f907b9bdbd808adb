"""A `sluice serve` or `sluice replica` process, on free ports, driven by tests from outside."""

import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Self

from tests.fork_server import ROOT as ROOT
from tests.fork_server import ForkedProcess, forked

EVERY_SERVER: list[str] = []
"""Flags that every server gets before its own."""
FLEET: list[int] = []
"""The number of replicas of every server, if it shall be the router of a fleet."""
ROUTERS: list[Random] = []
"""Chooses one of two routers for each address that a test reads; without it, the first one."""
ROUTED = ("http", "grpc")
"""Ports of which a test has those of any router."""
OF_ONE_ROUTER = re.compile(
    r"--(access-log|audit-log|log-file|trace-config|[a-z-]+-(port[= ][1-9]|address=unix))"
)
"""Flags with files and ports that two routers cannot share: there is one."""
OF_MODELS = re.compile(
    r"--(model-|load-model|backend|rate-limit|strict|disable-auto|exit-on|host-pol)"
)
"""Flags that are for the replicas of a router."""

STALL_FLAG = "--stall-secs"
STALL_SECS = 60.0
"""No instance may be without progress for so long; a server that restarts one fails its test."""

SERVE = ("serve",)
START_SECS = 180.0
STOP_SECS = 60.0
WAIT_SECS = 20.0
POLL_SECS = 0.01
LEAST_POLLS = 20
BLOCKED = "event loop blocked"
PORTS = "http|grpc|metrics|admin|grpc-admin|fleet"
ANNOUNCED = re.compile(rf"^\s*({PORTS})\s+(?:http://)?(?:\S+:\d+|unix:\S+)\s*$")
LISTENING = re.compile(rf"listening for=({PORTS}) port=(\d+)")

Start = Callable[[Sequence[str], Mapping[str, str]], subprocess.Popen[str] | ForkedProcess]
"""Starts a server with arguments and an environment."""


class Serving:
    """A running server; `log` holds what it has written so far.

    `hosts` are a router's replicas. `others` are further routers of theirs: lines are those of all
    of them, addresses and metrics, too, unless a test asks one; `own_ports`, signals and the end
    are those of this one.
    """

    def __init__(
        self,
        repository: Path | str,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = SERVE,
        start: Start = forked,
    ) -> None:
        self.log: list[str] = []
        self.hosts: Sequence[Serving] = ()
        self.others: Sequence[Serving] = ()
        self.own_ports: dict[str, int] = {}
        self._announced: set[str] = set()
        self._may_stall = any(flag.startswith(STALL_FLAG) for flag in flags)
        self._listening = threading.Event()
        self._ready = threading.Event()
        self._is_over = False
        self._state = TemporaryDirectory(prefix="state-")
        self.process = start(
            [
                *(*command, f"--model-repository={repository}"),
                *("--http-port=0", "--grpc-port=0", "--metrics-port=0"),
                *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1"),
                f"{STALL_FLAG}={STALL_SECS:g}",
                *EVERY_SERVER,
                *flags,
            ],
            {**os.environ, "XDG_STATE_HOME": self._state.name, **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def ports(self) -> Mapping[str, int]:
        """Its ports by their names; those of the wires may be of another router each time."""
        if not self.others:
            return self.own_ports
        chosen = ROUTERS[0].choice((self, *self.others)) if ROUTERS else self
        wires = {name: chosen.own_ports[name] for name in ROUTED if name in self.own_ports}
        return {name: port for name, port in self.own_ports.items() if name != "fleet"} | wires

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
        return "\n".join(self._lines)

    @property
    def said(self) -> list[str]:
        """The lines of its log, without those about the event loop of a busy machine."""
        return [line for line in self._lines if BLOCKED not in line]

    @property
    def every_line(self) -> Iterator[str]:
        """The lines that it, the other routers and its replicas have written so far."""
        return chain(self._lines, *(each.log for each in self.hosts))

    @property
    def _lines(self) -> Iterator[str]:
        return chain(self.log, *(each.log for each in self.others))

    @property
    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    @property
    def open_files(self) -> int:
        """The number of files and sockets that the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait_listening(self) -> Self:
        """Wait until the ports answer; models may still be loading."""
        return self._wait(self._listening)

    def wait_ready(self) -> Self:
        """Wait for the lines that name the ports."""
        return self._wait(self._ready)

    def wait_logged(self, text: str, within: float = WAIT_SECS) -> None:
        """Wait until a line of the log, or of that of a replica, holds the text."""
        said = f"log says {text!r}"
        wait_until(lambda: any(text in line for line in self.every_line), said, within)

    def metrics(self) -> dict[str, float]:
        """Every sample of the metrics page: `name{labels}` to value."""
        found: dict[str, float] = {}
        for line in self._page:
            name, _, value = line.rpartition(" ")
            if not line.startswith("#"):
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def metric(self, name: str, model: str, **labels: str) -> float:
        """One sample of a model's; KeyError if the page has no such sample."""
        wanted = series(name, model, **labels)
        found = [line for line in self._page if line.startswith(wanted)]
        if not found:
            raise KeyError(wanted)
        return sum(float(line.removeprefix(wanted)) for line in found)

    @property
    def _page(self) -> Sequence[str]:
        asked = (self, *self.others) if ROUTERS else (self,)
        ports = (each.own_ports["metrics"] for each in asked)
        pages = (http_get(port, "/metrics")[1] for port in ports)
        return [line for page in pages for line in page.decode().splitlines()]

    def wait_metric(
        self, name: str, model: str, wanted: float, within: float = WAIT_SECS, **labels: str
    ) -> None:
        """Wait until a sample has a value."""
        what = f"{name} of {model} is {wanted:g}"
        wait_until(lambda: self.metric(name, model, **labels) == wanted, what, within)

    def begin_stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, and do not wait for what comes of it."""
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait_ended()

    def wait_ended(self, within: float = STOP_SECS) -> int:
        """Wait for the end, and return the exit status; a process that does not end is killed.

        AssertionError if an instance has stalled, unless the server has flags about that.
        """
        try:
            status = self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join(STOP_SECS)
        self._state.cleanup()
        stalls = [line for line in self.log if "instance stalled" in line]
        assert self._may_stall or not stalls, stalls
        return status

    def _wait(self, event: threading.Event) -> Self:
        if not event.wait(START_SECS) or not self.own_ports or self._is_over:
            self.stop()
            raise AssertionError(f"the server did not start:\n{self.text}")
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                self._notice(line)
        self._is_over = True
        self._listening.set()
        self._ready.set()

    def _notice(self, line: str) -> None:
        if found := LISTENING.search(line):
            self.own_ports[found[1]] = int(found[2])
        elif found := ANNOUNCED.match(line):
            self._announced.add(found[1])
        if "loading model model=" in line or self._announced:
            self._listening.set()
        if self.own_ports and self._announced == self.own_ports.keys():
            self._ready.set()


@contextmanager
def serving(
    repository: Path | str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = SERVE,
    start: Start = forked,
) -> Iterator[Serving]:
    """A ready server for the length of the block; with FLEET `sluice serve` routes to replicas."""
    if FLEET and command == SERVE:
        with ExitStack() as owner:
            yield _fleet(owner, repository, flags, environment, start)
        return
    with running(Serving(repository, flags, environment, command, start)) as server:
        yield server


@contextmanager
def replica(
    repository: Path | str,
    model: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    start: Start = forked,
) -> Iterator[Serving]:
    """A ready replica of a model for the length of the block; it has a metrics page, too."""
    own = ("--fleet-port=0", "--allow-metrics=true", *flags)
    with running(Serving(repository, own, environment, ("replica", model), start)) as server:
        yield server


def _fleet(
    owner: ExitStack,
    repository: Path | str,
    flags: Sequence[str],
    environment: Mapping[str, str] | None,
    start: Start,
) -> Serving:
    """The first of two routers without own models, and replicas of the models of the repository."""
    of_models = [each for each in flags if OF_MODELS.match(each)]
    hosts = [
        owner.enter_context(
            replica(repository, "*", *of_models, environment=environment, start=start)
        )
        for _ in range(*FLEET)
    ]
    nothing = Path(owner.enter_context(TemporaryDirectory()))
    of_router = [each for each in flags if not OF_MODELS.match(each)]
    count = 1 if OF_ONE_ROUTER.search(" ".join(of_router)) else 2
    of_router += [static_fleet(*hosts), "--fleet-port=0"]
    first, *others = (
        owner.enter_context(running(Serving(nothing, of_router, environment))) for _ in range(count)
    )
    for each in (first, *others):
        each.hosts = hosts
        if others:
            _wait_other_known(each)
    first.others = others
    return first


def _wait_other_known(router: Serving) -> None:
    """Wait until a router knows the other one, unless it tells strangers nothing."""

    def is_so() -> bool:
        try:
            status, body = http_get(router.ports["http"], "/v2/fleet")
        except (KeyError, OSError, http.client.HTTPException):
            return True  # without HTTP, or over TLS
        return status != 200 or len(json.loads(body)["routers"]) == 1

    wait_until(is_so, "the other router is known")


def static_fleet(*replicas: Serving) -> str:
    """The flag of a router of these replicas."""
    return "--fleet=static:" + ",".join(f"127.0.0.1:{each.ports['fleet']}" for each in replicas)


@contextmanager
def running(server: Serving) -> Iterator[Serving]:
    """The process, ready, for the length of the block."""
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def write_model(
    repository: Path, name: str, config: str, versions: Iterable[int | str] = (1,)
) -> None:
    """Add a model with empty versions to a repository."""
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)


def series(name: str, model: str, **labels: str) -> str:
    """The name on the metrics page of a sample of a model's version 1, or of another."""
    every = {"version": "1", **labels, "model": model}
    shown = ",".join(f'{key}="{value}"' for key, value in sorted(every.items()))
    return f"{name}{{{shown}}}"


@contextmanager
def held(repository: Path, model: str) -> Iterator[None]:
    """In this block a model of `identity` with HOLD answers nothing."""
    file = repository / model / "1" / "held"
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def http_get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a page of a server on this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool], what: str, within: float = WAIT_SECS) -> None:
    """Poll until the condition holds; AssertionError says what did not come true in time.

    The time is over after `within` seconds, and on a busy machine not before LEAST_POLLS polls.
    """
    deadline, polls = time.monotonic() + within, 0
    while not condition():
        polls += 1
        is_over = time.monotonic() >= deadline and polls >= LEAST_POLLS
        assert not is_over, f"not within {within:g} s: {what}"
        time.sleep(POLL_SECS)
