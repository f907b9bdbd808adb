"""Servers under test: start, stop, CPUs, metrics, and their processes; the gateway and vLLM."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from urllib.error import URLError
from urllib.request import urlopen

LOGS = Path(__file__).parents[1] / "results" / "logs"
START_TIMEOUT_SECS = 300.0
STOP_TIMEOUT_SECS = 20.0
LOG_TAIL = 20
CLIENT_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that Linux gives to clients, and to servers that leave the choice to it."""
FIRST_CLIENT_PORT = 32768
LEAST_PORT = 1024
PORT_TRIES = 100
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
"""The environment of every server: vLLM reports no usage."""


class LoadTestFailed(Exception):
    """A load test without valid figures; the text has the reason."""


class ServerFailed(LoadTestFailed):
    """A server did not start, or failed a request; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one server; some may be the same."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The start of a server, which serves as soon as `ready_path` answers 200."""

    name: str
    command: Sequence[str]
    ports: Ports
    ready_path: str = "/v2/health/ready"
    poll_secs: float = 0.2


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

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
    """Run the block, and all processes that start in it, on these CPUs."""
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
    """A ready server on these CPUs; the end of the block ends all its processes."""
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
    """Ports that are free now, below those that the system gives to clients if there are such."""
    first = int(CLIENT_PORTS.read_text().split()[0]) if CLIENT_PORTS.exists() else FIRST_CLIENT_PORT
    below = range(max(LEAST_PORT, first // 2), first)
    tried = [*SystemRandom().sample(below, min(PORT_TRIES, len(below))), 0, 0, 0]
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < 3:
            made = stack.enter_context(socket.socket())
            with suppress(OSError):
                made.bind(("127.0.0.1", tried.pop(0)))
                found.append(made.getsockname()[1])
    return Ports(*found)


def _wait_until_ready(launch: Launch, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECS
    url = f"http://127.0.0.1:{launch.ports.http}{launch.ready_path}"
    while not _answers(url):
        if process.poll() is not None:
            raise ServerFailed(f"{launch.name} ended with {process.returncode}\n{tail(log)}")
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"{launch.name} is not ready after {START_TIMEOUT_SECS:g} s\n{tail(log)}"
            )
        time.sleep(launch.poll_secs)


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


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])


GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Contender:
    """One server of a comparison; each start has ports of its own."""

    name: str
    launch: Callable[[], Launch]


def gateway(repository: Path | str, name: str = GATEWAY, *flags: str) -> Contender:
    """The gateway, serving a repository: a folder, or an address of object storage."""

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


def replica(repository: Path, name: str = "replica", model: str = "*") -> Launch:
    """A replica of a model of a repository, or of all; its port of gRPC is that for routers.

    It may answer before its models are loaded.
    """
    ports = free_ports()
    command = [
        *(sys.executable, "-m", "gateway", "replica", model),
        *("--model-repository", str(repository), "--fleet-port", str(ports.grpc)),
        *("--allow-metrics", "true", "--metrics-port", str(ports.http)),
    ]
    return Launch(name=name, command=command, ports=ports, ready_path="/metrics")


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


def read_metrics(port: int) -> Sequence[str]:
    """The lines of a server's metrics page."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read(), "utf-8").splitlines()


def total(lines: Sequence[str], name: str) -> float:
    """The sum of all series of one metric."""
    series = (line for line in lines if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in series)


def in_flight(server: Server) -> int:
    """The requests in flight, by the gateway's own gauge."""
    return int(total(read_metrics(server.ports.metrics), "gateway_requests_in_flight"))


PROC = Path("/proc")
SERVER, ENGINE, FRONTENDS, CLIENTS = "server", "engine", "frontends", "clients"
MODULES = {"gateway.processes": FRONTENDS, "backends.vllm.engine_clients": CLIENTS}
"""Roles of the gateway's processes besides the server, by a word of their command lines."""


def descendants(pid: int) -> Sequence[int]:
    """The children of a process, and theirs."""
    parents = dict(_parents())
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def _parents() -> Iterator[tuple[int, int]]:
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (fields := stat(int(folder.name))):
            yield int(folder.name), int(fields[1])


def stat(pid: int) -> Sequence[str]:
    """The fields of `/proc/PID/stat` from the state on; none if the process has ended."""
    return read_proc(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """The process exists, and is no zombie."""
    fields = stat(pid)
    return bool(fields) and fields[0] != "Z"


def name_of(pid: int) -> str:
    """The name of a process, cut to 15 characters by the kernel; "" if it has ended."""
    return read_proc(pid, "comm").decode(errors="replace").strip()


def resident_bytes(pid: int) -> int:
    """The bytes of a process in RAM."""
    pages = read_proc(pid, "statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def shared_out_bytes(server: Server) -> int:
    """The bytes of the server's processes in RAM; a page of several counts for each in part."""
    return sum(_proportional_bytes(pid) for pid in (server.pid, *descendants(server.pid)))


def _proportional_bytes(pid: int) -> int:
    lines = read_proc(pid, "smaps_rollup").decode().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def open_files(pid: int) -> int:
    """The number of open descriptors of a process."""
    return len(os.listdir(PROC / str(pid) / "fd"))


def cpu_secs(pid: int) -> float:
    """The processor time of a process, of the user and of the system."""
    user, system = stat(pid)[11:13] or (0, 0)
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def tree_secs(pid: int) -> Mapping[int, float]:
    """Processor time of a server's processes, by their ids."""
    return {each: cpu_secs(each) for each in (pid, *descendants(pid))}


@dataclass(slots=True)
class Spent:
    """Processor time of a server's processes during a block, by their roles."""

    by_role: Mapping[str, float] = field(default_factory=dict)

    @property
    def secs(self) -> float:
        """Processor time of all processes."""
        return sum(self.by_role.values())

    def secs_of(self, *roles: str) -> float:
        """Processor time of the processes with these roles."""
        return sum(self.by_role.get(role, 0.0) for role in roles)


@contextmanager
def spending(pid: int) -> Iterator[Spent]:
    """The processor time of a server during the block, known after its end."""
    spent, before = Spent(), tree_secs(pid)
    yield spent
    found: defaultdict[str, float] = defaultdict(float)
    for each, secs in tree_secs(pid).items():
        found[SERVER if each == pid else _role(each)] += max(secs - before.get(each, 0.0), 0.0)
    spent.by_role = found


def _role(pid: int) -> str:
    words = read_proc(pid, "cmdline").decode(errors="replace").split("\0")
    return next((role for module, role in MODULES.items() if module in words), ENGINE)


def read_proc(pid: int, name: str) -> bytes:
    """A file of `/proc/PID`; empty if the process has ended."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
