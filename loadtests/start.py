"""Start of a gateway without engines: processor time, seconds until it is ready, and memory."""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadtests.support import rounds, servers
from loadtests.support.results import Line, Metric, Results, comparison
from loadtests.support.rounds import Report
from loadtests.support.servers import (
    GATEWAY,
    Cpus,
    resident_bytes,
    serving,
    tree_secs,
)

MODEL = "identity"
CONFIG = """backend: "identity"
input { name: "INPUT" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [-1] }
"""
POLL_SECS = 0.01
LINE = Line(f"start with {MODEL}", "start")
MIB = 2**20


def start(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Start a gateway with the model `identity`, until it is ready."""
    rounds.add_flags(parser)
    parser.set_defaults(rounds=5)
    rounds.run_test(parser, arguments, _start)


def _start(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    (folder / MODEL / "1").mkdir(parents=True)
    (folder / MODEL / "config.pbtxt").write_text(CONFIG)
    results = Results()
    _started(folder, asked.server_cpus)  # Python compiles its modules once
    for _ in range(asked.rounds):
        results.add(GATEWAY, _started(folder, asked.server_cpus))
    return Report(comparison("Start", results, [GATEWAY]), results.as_lines())


def _started(repository: Path, cpus: Cpus) -> Mapping[Metric, float]:
    launch = replace(servers.gateway(repository).launch(), poll_secs=POLL_SECS)
    began = time.perf_counter()
    with serving(launch, cpus) as server:
        took = time.perf_counter() - began
        spent = tree_secs(server.pid)
        return {
            LINE.processor_time: sum(spent.values()) * 1e6,
            LINE.lower("until ready", "s"): took,
            LINE.lower("memory", "MiB"): sum(map(resident_bytes, spent)) / MIB,
        }
