"""Ten times the capacity of a Python model, with deadlines: the gateway, and Triton."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtests.fair_floods import FLOOD, LONG_MS, of_overload
from loadtests.support import rounds
from loadtests.support.findings import Finding
from loadtests.support.http_client import Address, post, with_headers
from loadtests.support.results import Line, Metric, Results
from loadtests.support.rounds import Plan, Step
from loadtests.support.servers import GATEWAY, Contender, Server, gateway
from loadtests.support.timed_load import Flow, answered, send
from loadtests.support.triton import triton
from loadtests.tenants import Keys, write_tenants

TRITON = "triton"
MODEL = "timed"
DEADLINE_MS = 1000
QUEUE_SHARE = 0.9
"""Part of the deadline that Triton's queue may take: the rest is for the execution."""
CAPACITY_SECS = 5.0
CLIENTS = 4
LINE = Line(f"10 times the capacity of tensors, answer within {DEADLINE_MS} ms", "infer")
CONFIG = """
backend: "python"
max_batch_size: 1
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
QUEUE_POLICY = """
dynamic_batching {
  default_queue_policy { timeout_action: REJECT default_timeout_microseconds: TIMEOUT_US }
}
"""
MODEL_PY = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            time.sleep(0.02)
            values = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", values)]))
        return answers
"""


def overload_tensors(
    asked: argparse.Namespace, folder: Path, console: Console, results: Results
) -> Sequence[Finding]:
    """Ten times the capacity of tensors, at fixed times: deadlines here, a queue policy in Triton.

    With `--triton`; without it the gateway alone.
    """
    keys = write_tenants(folder / "keys.toml", {"flood": {}})
    steps: Sequence[Step] = [("overload", partial(_overload, asked, keys))]
    contenders = _contenders(asked, folder, keys)
    every = {each.name: steps for each in contenders}
    found = rounds.run(Plan(contenders, every, asked.rounds, asked.server_cpus), console)
    results.merge(found)
    in_time, refusal = LINE.other("in time", "of capacity"), LINE.lower("refusal p99", "ms")
    late = results.median(LINE.lower("admitted late", "%"), GATEWAY)
    theirs = [
        Finding(figure=f"in time, of capacity, {TRITON}", value=results.median(in_time, TRITON)),
        Finding(figure=f"refusal p99, {TRITON}", value=results.median(refusal, TRITON), unit="ms"),
    ]
    return [
        Finding(figure="in time, of capacity", value=results.median(in_time, GATEWAY), least=0.9),
        Finding(figure="refusal p99", value=results.median(refusal, GATEWAY), unit="ms", most=50),
        Finding(figure="admitted late", value=late, unit="%", most=5),
        *(theirs if asked.triton else []),
    ]


def _contenders(asked: argparse.Namespace, folder: Path, keys: Keys) -> Sequence[Contender]:
    ours = _write_model(folder / "repository", CONFIG)
    found = [gateway(ours, GATEWAY, f"--api-keys={keys.file}")]
    if asked.triton:
        timeout_us = int(QUEUE_SHARE * DEADLINE_MS * 1000)
        policy = QUEUE_POLICY.replace("TIMEOUT_US", str(timeout_us))
        found.insert(0, triton(asked.triton, _write_model(folder / TRITON, CONFIG + policy)))
    return found


def _write_model(repository: Path, config: str) -> Path:
    (repository / MODEL / "1").mkdir(parents=True)
    (repository / MODEL / "config.pbtxt").write_text(config)
    (repository / MODEL / "1" / "model.py").write_text(MODEL_PY)
    return repository


def _overload(asked: argparse.Namespace, keys: Keys, server: Server) -> Mapping[Metric, float]:
    address = Address(server.ports.http)
    path, own = f"/v2/models/{MODEL}/generate_stream", keys.headers("flood")

    def request(timeout_ms: int) -> bytes:
        headers = {**own, "x-request-timeout-ms": str(timeout_ms)}
        return with_headers(post(path, address, b'{"INPUT": 1.0}'), headers)

    (before,) = answered(address, [[request(LONG_MS)] * CLIENTS], CAPACITY_SECS)
    capacity = sum(each.complete for each in before) / CAPACITY_SECS
    timed, secs = request(DEADLINE_MS), DEADLINE_MS / 1000
    (sent,) = send(address, [Flow(FLOOD * capacity, lambda _: timed)], asked.secs, secs)
    return of_overload(LINE, sent, capacity * asked.secs, secs)
