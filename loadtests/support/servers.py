"""Servers under test: start, stop, CPUs, counters; the gateway, vLLM and Triton."""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

LOGS = Path(__file__).parents[1] / "results" / "logs"
START_TIMEOUT_SECS = 300.0
STOP_TIMEOUT_SECS = 20.0
LOG_TAIL = 20
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
"""The environment of every server: vLLM reports no usage."""


class ServerFailed(Exception):
    """A server did not start, or did not do what was asked; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one server; some may be the same."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server is started; it serves as soon as `ready_path` answers 200."""

    name: str
    command: Sequence[str]
    ports: Ports
    ready_path: str = "/v2/health/ready"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs."""

    name: str
    pid: int
    ports: Ports


Cpus = frozenset[int]
"""Numbers of CPUs; empty: all."""


def parse_cpus(text: str) -> Cpus:
    """CPUs as `taskset -c` writes them: `0,2-3`."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of CPUs such as 0,2-3") from None
    if missing := found - os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"this machine does not lend CPU {min(missing)}")
    return frozenset(found)


@contextmanager
def pinned(cpus: Cpus) -> Iterator[None]:
    """What starts inside runs on these CPUs; afterwards the caller is where it was."""
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)


def add_cpu_flags(parser: argparse.ArgumentParser) -> None:
    """The flags `--server-cpus` and `--client-cpus`."""
    for role in ("server", "client"):
        parser.add_argument(
            f"--{role}-cpus",
            type=parse_cpus,
            default=Cpus(),
            metavar="LIST",
            help=f"run every {role} on these CPUs, such as 0,2-3 (default: all)",
        )


@contextmanager
def serving(launch: Launch, cpus: Cpus) -> Iterator[Server]:
    """A server that is ready, on those CPUs; leaving the block ends all its processes."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{launch.name}.log"
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        with pinned(cpus):
            process = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is ours: we stop the servers ourselves
            )
        stack.callback(_stop, process)
        _wait_until_ready(launch, process, log)
        yield Server(launch.name, process.pid, launch.ports)


def free_ports() -> Ports:
    """Ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def _wait_until_ready(launch: Launch, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECS
    url = f"http://127.0.0.1:{launch.ports.http}{launch.ready_path}"
    while not _answers(url):
        if process.poll() is not None:
            raise ServerFailed(f"{launch.name} ended with {process.returncode}\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"{launch.name} is not ready after {START_TIMEOUT_SECS:g} s\n{_tail(log)}"
            )
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, which ends its own processes; SIGKILL to the rest."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_SECS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])


GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Contender:
    """One server of a comparison; each start has ports of its own."""

    name: str
    launch: Callable[[], Launch]


def gateway(repository: Path, name: str = GATEWAY, *flags: str) -> Contender:
    """The gateway, serving a repository."""

    def launch() -> Launch:
        ports = free_ports()
        command = [
            *(sys.executable, "-m", "gateway", "serve"),
            *("--model-repository", str(repository)),
            *("--http-port", str(ports.http)),
            *("--grpc-port", str(ports.grpc)),
            *("--metrics-port", str(ports.metrics)),
            *flags,
        ]
        return Launch(name=name, command=command, ports=ports)

    return Contender(name, launch)


def triton(command: str, repository: Path) -> Contender:
    """A Triton, started by a command that takes a repository and three ports."""

    def launch() -> Launch:
        ports = free_ports()
        ours = [str(repository), str(ports.http), str(ports.grpc), str(ports.metrics)]
        return Launch(name="triton", command=[*shlex.split(command), *ours], ports=ports)

    return Contender("triton", launch)


def add_triton_flag(parser: argparse.ArgumentParser) -> None:
    """The flag `--triton`."""
    parser.add_argument(
        "--triton",
        metavar="COMMAND",
        help="compare with the Triton that `COMMAND REPOSITORY HTTP GRPC METRICS` starts",
    )


def vllm(model: str, engine_flags: Sequence[str]) -> Contender:
    """vLLM's own OpenAI server with one model."""

    def launch() -> Launch:
        port = free_ports().http
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", model),
            # The gateway writes no line per request either.
            "--disable-uvicorn-access-log",
            *engine_flags,
        ]
        return Launch(
            name="vllm", command=command, ports=Ports(port, port, port), ready_path="/health"
        )

    return Contender("vllm", launch)


SETTLE_SECS = 5.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of prompts and of completions."""

    prompt: int
    completion: int

    def __sub__(self, earlier: "Tokens") -> "Tokens":
        return Tokens(self.prompt - earlier.prompt, self.completion - earlier.completion)


@dataclass(frozen=True, slots=True)
class TokenCounters:
    """Where a server's metrics are, and what the two counters are called."""

    port: int
    prompt: str
    completion: str

    def read(self) -> Tokens:
        """The counters now."""
        lines = read_metrics(self.port)
        return Tokens(int(total(lines, self.prompt)), int(total(lines, self.completion)))

    def read_after(self, before: Tokens, expected: int) -> Tokens:
        """What was counted since `before`, as soon as `expected` completion tokens are.

        A server counts a request when it has ended, which may be after its client knows.
        """
        deadline = time.monotonic() + SETTLE_SECS
        while (found := self.read() - before).completion < expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found


def read_metrics(port: int) -> Sequence[str]:
    """The lines of a server's metrics page."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read(), "utf-8").splitlines()


def total(lines: Sequence[str], name: str) -> float:
    """The sum of all series of one metric."""
    series = (line for line in lines if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in series)
