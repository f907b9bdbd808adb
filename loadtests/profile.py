"""A flame graph of one hot path of the server, by py-spy."""

import argparse
import http.client
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import orjson
from rich.console import Console
from tritonclient import grpc as triton_client

from loadtests.support import rounds
from loadtests.support.http_client import (
    ADD_SUB_BODY,
    ADD_SUB_PATH,
    TIMEOUT_SECS,
    Address,
    posting,
)
from loadtests.support.servers import Cpus, LoadTestFailed, Server, gateway, serving

HERE = Path(__file__).parent
FOLDER = Path("artefacts") / "profiles"
VALUES = [0.5] * 16
NAMES = ("INPUT0", "INPUT1")
STREAM = orjson.dumps({"text_input": "token", "n": 1000})

FAILURES = (
    OSError,
    http.client.HTTPException,
    LoadTestFailed,
    triton_client.InferenceServerException,
)

Send = Callable[[], None]
"""Sends one request and reads its whole response."""


def profile(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Serve add_sub and repeat, send requests over one path, and draw the samples of py-spy."""
    parser.add_argument("--path", choices=PATHS, default="infer", help="default: %(default)s")
    parser.add_argument("--clients", type=rounds.positive, default=4, help="default: %(default)s")
    parser.add_argument("--secs", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--rate", type=rounds.positive, default=500, help="samples per second")
    parser.add_argument("--native", action="store_true", help="show frames of C extensions")
    parser.add_argument("--output", type=Path, help=f"default: {FOLDER}/PATH.svg")
    options = parser.parse_args(arguments)
    target = options.output or FOLDER / f"{options.path}.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    with rounds.failures_as_lines("profile"):
        _profile(options, target)
    Console().print(
        f"{target}: {options.secs:g} s of '{options.path}' with {options.clients} clients"
    )


def _profile(options: argparse.Namespace, target: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(gateway(HERE / "models").launch(), Cpus()))
        stopping, failures = threading.Event(), list[Exception]()
        for _ in range(options.clients):
            client = partial(_send_until, stopping, failures, PATHS[options.path], server)
            thread = threading.Thread(target=client, daemon=True)
            thread.start()
            stack.callback(thread.join, TIMEOUT_SECS)
        stack.callback(stopping.set)
        _record(options, server, target)
        if failures:
            raise LoadTestFailed(f"{options.path}: {failures[0]}")


def _record(options: argparse.Namespace, server: Server, target: Path) -> None:
    """Sample the server; LoadTestFailed with the last line of py-spy if it fails."""
    command = [
        *(_py_spy(), "record", "--pid", str(server.pid)),
        *("--duration", f"{max(1, round(options.secs))}", "--rate", str(options.rate)),
        *("--format", "flamegraph", "--output", str(target)),
        *(["--native"] if options.native else []),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"status {ended.returncode}"]
        raise LoadTestFailed(f"py-spy failed: {lines[-1]}")


def _py_spy() -> str:
    """The program of this environment, else the one on the PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise LoadTestFailed("py-spy is not installed: run 'pip install py-spy'")
    return found


def _send_until(
    stopping: threading.Event,
    failures: list[Exception],
    connect: Callable[[Server, ExitStack], Send],
    server: Server,
) -> None:
    with ExitStack() as stack:
        try:
            send = connect(server, stack)
            while not stopping.is_set():
                send()
        except FAILURES as error:
            failures.append(error)


def _http(path: str, body: bytes, server: Server, stack: ExitStack) -> Send:
    return stack.enter_context(posting(Address(server.ports.http), path, body))


def _grpc(server: Server, stack: ExitStack) -> Send:
    client = triton_client.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}")
    stack.callback(client.close)
    inputs = [triton_client.InferInput(name, [1, 16], "FP32") for name in NAMES]
    for each in inputs:
        each.set_data_from_numpy(np.array([VALUES], np.float32))

    def send() -> None:
        client.infer("add_sub", inputs, client_timeout=TIMEOUT_SECS)

    return send


PATHS: Mapping[str, Callable[[Server, ExitStack], Send]] = {
    "infer": partial(_http, ADD_SUB_PATH, ADD_SUB_BODY),
    "grpc": _grpc,
    "stream": partial(_http, "/v2/models/repeat/generate_stream", STREAM),
}
"""Ways in: unary infer over HTTP (JSON) and gRPC, and a stream of 1000 events."""
