"""NVIDIA's perf_analyzer as a client."""

import argparse
import csv
import os
import resource
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loadtests.support.rounds import LoadTestFailed
from loadtests.support.servers import Server

WINDOWS = 3
"""perf_analyzer compares that many windows before it believes them."""
STABLE_PERCENT = 900
"""Every measurement counts: rounds and medians are what makes figures steady here."""
START_SECS = 30.0
PATIENCE = 5.0
"""The time limit as a multiple of the windows, without the start; it sometimes hangs."""
TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Which requests are sent, over which wire (`http` or `grpc`), by how many clients at once.

    With 0 clients the `extra` flags say how many there are.
    """

    model: str
    wire: str
    clients: int
    extra: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """What perf_analyzer saw, and how much of the machine it took itself."""

    per_sec: float
    p50_us: float
    p99_us: float
    client_cores: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags `--perf-analyzer` and `--window-secs`."""
    parser.add_argument(
        "--perf-analyzer",
        default="perf_analyzer",
        metavar="COMMAND",
        help="how to start perf_analyzer (default: %(default)s)",
    )
    parser.add_argument(
        "--window-secs",
        type=float,
        default=2.0,
        metavar="SECS",
        help=f"one of the {WINDOWS} windows of a measurement (default: %(default)s)",
    )


def measure(asked: argparse.Namespace, traffic: Traffic, server: Server) -> Measurement:
    """Put the traffic on a server.

    LoadTestFailed with what perf_analyzer says if it gives up, and if it hangs each time.
    """
    limit_secs = START_SECS + PATIENCE * WINDOWS * asked.window_secs
    for _ in range(TRIES):
        with suppress(subprocess.TimeoutExpired):
            return _measure(asked, traffic, server, limit_secs)
    raise LoadTestFailed(
        f"perf_analyzer was stopped {TRIES} times: model '{traffic.model}', {traffic.wire}, "
        f"{traffic.clients} clients, expected it to end within {limit_secs:g} s"
    )


def _measure(
    asked: argparse.Namespace, traffic: Traffic, server: Server, limit_secs: float
) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        command = [*shlex.split(asked.perf_analyzer), *_flags(asked, traffic, server, report)]
        began, used = time.monotonic(), _cpu_secs()
        client = _run(command, limit_secs)
        cores = (_cpu_secs() - used) / (time.monotonic() - began)
        if client.returncode or not report.exists():
            raise LoadTestFailed(f"perf_analyzer failed:\n{client.stdout}{client.stderr}")
        return _read(report, cores)


def _run(command: Sequence[str], limit_secs: float) -> subprocess.CompletedProcess[str]:
    """The result of the command; TimeoutExpired beyond the limit, with all its processes killed."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, to be killed whole: it may be a script
    ) as client:
        try:
            said, complained = client.communicate(timeout=limit_secs)
        except BaseException:
            os.killpg(client.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, client.returncode, said, complained)


def _flags(
    asked: argparse.Namespace, traffic: Traffic, server: Server, report: Path
) -> Sequence[str]:
    port = server.ports.http if traffic.wire == "http" else server.ports.grpc
    return [
        *("-m", traffic.model),
        *("-u", f"127.0.0.1:{port}", "-i", traffic.wire),
        *(("--concurrency-range", str(traffic.clients)) if traffic.clients else ()),
        *("-p", str(int(asked.window_secs * 1000)), "-r", str(WINDOWS), "-s", str(STABLE_PERCENT)),
        *("-f", str(report)),
        *traffic.extra,
    ]


def _read(report: Path, cores: float) -> Measurement:
    with report.open(newline="") as lines:
        row = next(csv.DictReader(lines))
    return Measurement(
        per_sec=float(row["Inferences/Second"]),
        p50_us=float(row["p50 latency"]),
        p99_us=float(row["p99 latency"]),
        client_cores=cores,
    )


def _cpu_secs() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
