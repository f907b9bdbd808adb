"""The time from `git clone` to the first token of `make serve`, and that of a second start."""

import argparse
import http.client
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtests.support import rounds, servers
from loadtests.support.results import Line, Results
from loadtests.support.rounds import Report
from loadtests.support.servers import GATEWAY, LoadTestFailed, Ports

ROOT = Path(__file__).parents[1]
QUESTION = {"text_input": "The capital of France is", "stream": True, "max_tokens": 8}
ENGINES = ("openvino_genai", "vllm")
POLL_SECS = 0.1
START, NEXT_START = "clone to first token", "second start to first token"
STAGES = {
    "environment and packages": r"^setup: done$",
    "model unpacked": r"^\S+: /.*models/",
    "wires answer": r'"listening for=http',
    "model ready": r'"model ready model=llama',
}
"""Lines of the output of `make serve` that end a stage."""


@dataclass
class Started:
    """Seconds to each end of a stage, and to the first token."""

    stages: Mapping[str, float]
    first_token: float


def first_minute(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Clone this checkout's last commit, run `make serve`, and ask for a first token; then again.

    Caches of uv and of models are empty unless --warm is given. Packages come from the indexes of
    pip's settings, so the time is also that of the network.
    """
    parser.add_argument(
        "--engine", choices=ENGINES, default=ENGINES[0], help="ENGINE of make serve"
    )
    parser.add_argument("--warm", action="store_true", help="use the user's cache of packages")
    parser.add_argument("--secs", type=float, default=600.0, metavar="N", help="longest start")
    rounds.run_test(parser, arguments, _first_minute)


def _first_minute(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    if not asked.warm:
        environment |= {"UV_CACHE_DIR": str(folder / "uv"), "PIP_NO_CACHE_DIR": "1"}
    began = time.monotonic()
    checkout = folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    cloned = time.monotonic() - began
    console.print(f"cloned after {cloned:.1f} s")
    first = _start(asked, checkout, environment, began)
    second = _start(asked, checkout, environment, time.monotonic())
    found = {"clone": cloned, **first.stages, START: first.first_token}
    found[NEXT_START] = second.first_token
    site = next(checkout.glob(".venv/lib/python*/site-packages"))
    size = sum(each.stat().st_size for each in site.rglob("*") if each.is_file())
    packages = len(list(site.glob("*.dist-info")))
    table = Table("stage", "seconds", title=f"The first minute, {asked.engine}")
    for stage, secs in found.items():
        table.add_row(stage, f"{secs:.1f}")
    note = f"{packages} packages, {size / 1e6:.0f} MB of site-packages"
    line, results = Line(f"make serve ENGINE={asked.engine}", "start"), Results()
    results.add(GATEWAY, {line.lower(stage, "s"): secs for stage, secs in found.items()})
    results.add(GATEWAY, {line.other("packages"): packages, line.other("size", "MB"): size / 1e6})
    return Report(table, results.as_lines(), [note])


def _start(
    asked: argparse.Namespace, checkout: Path, environment: Mapping[str, str], began: float
) -> Started:
    """Run `make serve` until the first token arrives, and stop it."""
    ports = servers.free_ports()
    flags = (
        f"--http-port={ports.http} --grpc-port={ports.grpc} --metrics-port={ports.metrics} "
        "--http-address=127.0.0.1 --grpc-address=127.0.0.1"
    )
    output = checkout.parent / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            ["make", "serve", f"ENGINE={asked.engine}", f"ARGS={flags}"],
            cwd=checkout,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stages: dict[str, float] = {}
    try:
        while not _answers(ports):
            _note_stages(output, stages, began)
            if process.poll() is not None or time.monotonic() - began > asked.secs:
                raise LoadTestFailed(f"no token: {output.read_text()[-1000:]}")
            time.sleep(POLL_SECS)
        _note_stages(output, stages, began)
        return Started(stages, time.monotonic() - began)
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def _note_stages(output: Path, stages: dict[str, float], began: float) -> None:
    text = output.read_text(errors="replace")
    for stage, line in STAGES.items():
        if stage not in stages and re.search(line, text, re.MULTILINE):
            stages[stage] = time.monotonic() - began


def _answers(ports: Ports) -> bool:
    """Whether the first event of a stream has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=60)
    try:
        body = json.dumps(QUESTION)
        connection.request("POST", "/v2/models/llama/generate_stream", body)
        answer = connection.getresponse()
        return answer.status == http.client.OK and b"text_output" in answer.readline()
    except OSError:
        return False
    finally:
        connection.close()
