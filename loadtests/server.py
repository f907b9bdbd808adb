"""How is a server started, and how does it end, whatever happens to whoever started it?"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from loadtests.cpus import Cpus, pinned

LOGS = Path(__file__).parent / "results" / "logs"
START_TIMEOUT_SECS = 300.0
STOP_TIMEOUT_SECS = 20.0
LOG_TAIL = 20
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
"""What every server finds in its environment: a load test reports to nobody."""


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
    """Ports that nobody listens on now."""
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
    """SIGTERM to the server, which ends its own processes; SIGKILL to whatever is left."""
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
