"""A rollout to watch: the second version of a model in object storage errs, a third one is good."""

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.rollouts.rollout import RolloutState
from gateway.tools.rollout import tables
from loadtests.support import rounds
from loadtests.support.http_client import call
from loadtests.support.servers import (
    GATEWAY,
    Cpus,
    Launch,
    LoadTestFailed,
    Server,
    free_ports,
    gateway,
    serving,
)

NAME = "greeting"
BUCKET = "models"
CONFIG = """backend: "python"
input [ { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
MODEL = '''"""Greets; one of {every} requests fails, none for 0."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """TEXT = "Hello NAME"."""

    def initialize(self, args):
        self.version, self.requests = args["model_version"], 0

    def execute(self, requests):
        """Answer the requests one by one."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        self.requests += 1
        if {every} and self.requests % {every} == 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("no greeting"))
        name = pb_utils.get_input_tensor_by_name(request, "NAME").as_numpy()[0].decode()
        text = np.array([f"Hello {{name}}, says version {{self.version}}".encode()], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text)])
'''
FAILS_EVERY = {1: 0, 2: 20, 3: 0}
"""The versions, and the requests of which one fails."""
WEIGHTS = (10, 50, 100)
LEAST_REQUESTS = 60
"""Requests of the new version in each step: enough for three errors of the second one."""
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=k/1/us-east-1/s3/aws4_request, Signature=0",
    "Content-Type": "application/octet-stream",
}
"""Moto checks no signature, but refuses requests without any."""
CLIENTS, RATE = 4, 100.0
BODY = orjson.dumps(
    {"inputs": [{"name": "NAME", "datatype": "BYTES", "shape": [1], "data": ["you"]}]}
)
LOOK_SECS = 0.25
MOST_SECS = 120.0
"""The longest time of one rollout."""
FAILED = "failed"


def demo_rollout(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Roll a version out that errs, which the server takes back, and then a good one."""
    parser.add_argument(
        "--step-secs",
        type=float,
        default=8.0,
        metavar="SECS",
        help="length of each of the three steps (default: %(default)s)",
    )
    asked, console = parser.parse_args(arguments), Console()
    with rounds.failures_as_lines("demo-rollout"), TemporaryDirectory() as name:
        folder = Path(name)
        with serving(_moto(), Cpus()) as storage:
            _create(storage)
            plan = {
                "steps": [
                    {"weight": each, "for": f"{asked.step_secs:g}s", "min_requests": LEAST_REQUESTS}
                    for each in WEIGHTS
                ],
                "guardrails": {"errors": {}, "slow": {}},
            }
            _put(storage, f"{NAME}/config.pbtxt", CONFIG)
            _put(storage, f"{NAME}/rollout.json", json.dumps(plan))
            _publish(storage, 1, console)
            with serving(_launch(storage, folder), Cpus()) as server, _asking(server) as answers:
                console.print(f"  sluice serve is ready at http://127.0.0.1:{server.ports.http}")
                _roll_out(storage, server, 2, answers, RolloutState.ROLLED_BACK, console)
                _show_audit(folder, console)
                _roll_out(storage, server, 3, answers, RolloutState.PROMOTED, console)
                _show_audit(folder, console)


def _roll_out(
    storage: Server,
    server: Server,
    version: int,
    answers: Counter[str],
    wanted: RolloutState,
    console: Console,
) -> None:
    """Publish a version, and show its rollout until it has ended as it shall."""
    answers.clear()
    _publish(storage, version, console)
    deadline = time.monotonic() + MOST_SECS
    with Live(console=console, auto_refresh=False) as live:
        while True:
            rows = call(server.ports.http, "/v2/rollouts")
            live.update(Group(tables({"": rows}), _answers(answers)), refresh=True)
            row = next((each for each in rows if each.get("candidate") == version), {})
            state = row.get("state")
            if state == wanted:
                break
            if time.monotonic() > deadline or state in (
                RolloutState.ROLLED_BACK,
                RolloutState.PROMOTED,
            ):
                raise LoadTestFailed(f"version {version} is {state}, expected {wanted}: {row}")
            time.sleep(LOOK_SECS)


def _answers(answers: Counter[str]) -> Table:
    found = Table(title="answers", title_justify="left")
    for name in ("version", "requests"):
        found.add_column(name)
    for name, count in sorted(answers.items()):
        found.add_row(name, f"{count}")
    return found


def _show_audit(folder: Path, console: Console) -> None:
    """The last line of the audit log."""
    line = (folder / "audit.jsonl").read_text().splitlines()[-1]
    console.print("\nthe last line of the audit log:")
    console.print(Text(line), soft_wrap=True)


def _launch(storage: Server, folder: Path) -> Launch:
    address = f"s3://http://127.0.0.1:{storage.ports.http}/{BUCKET}"
    launch = gateway(
        address,
        GATEWAY,
        *("--model-control-mode=poll", "--repository-poll-secs=1", "--repository-settle-secs=0"),
        *(f"--state-directory={folder / 'state'}", f"--audit-log={folder / 'audit.jsonl'}"),
    ).launch()
    variables = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "SLUICE_CACHE": str(folder / "cache"),
    }
    words = [f"{name}={value}" for name, value in variables.items()]
    return replace(launch, command=["/usr/bin/env", *words, *launch.command])


# The storage.


def _moto() -> Launch:
    ports = free_ports()
    command = [sys.executable, "-m", "moto.server", "-p", str(ports.http)]
    return Launch(name="moto", command=command, ports=ports, ready_path="/moto-api/")


def _create(storage: Server) -> None:
    _request(storage, BUCKET)


def _put(storage: Server, key: str, content: str) -> None:
    _request(storage, f"{BUCKET}/{quote(key)}", content)


def _request(storage: Server, path: str, content: str = "") -> None:
    url = f"http://127.0.0.1:{storage.ports.http}/{path}"
    request = Request(url, content.encode(), SIGNED, method="PUT")
    with urlopen(request, timeout=10) as answer:
        answer.read()


def _publish(storage: Server, version: int, console: Console) -> None:
    every = FAILS_EVERY[version]
    errs = f", which fails one of {every} requests" if every else ""
    console.print(f"\n[bold]version {version}{errs}, is written to s3://{BUCKET}/{NAME}")
    _put(storage, f"{NAME}/{version}/model.py", MODEL.format(every=every))


# The clients.


@contextmanager
def _asking(server: Server) -> Iterator[Counter[str]]:
    """Requests without a version during the block; answers by version, and failed ones."""
    answers, ended = Counter[str](), threading.Event()
    threads = [threading.Thread(target=_ask, args=(server, answers, ended)) for _ in range(CLIENTS)]
    for each in threads:
        each.start()
    try:
        yield answers
    finally:
        ended.set()
        for each in threads:
            each.join()


def _ask(server: Server, answers: Counter[str], ended: threading.Event) -> None:
    while not ended.wait(CLIENTS / RATE):
        answers[_version_of_an_answer(server)] += 1


def _version_of_an_answer(server: Server) -> str:
    try:
        found: Any = call(server.ports.http, f"/v2/models/{NAME}/infer", orjson.loads(BODY))
    except HTTPError as error:
        error.close()
        return FAILED
    return str(found["model_version"])
