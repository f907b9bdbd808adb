"""Comparisons with Triton: models and texts for both servers, and NVIDIA's perf_analyzer."""

import argparse
import csv
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests.support import rounds
from loadtests.support.results import Line, Metric
from loadtests.support.servers import (
    Contender,
    Launch,
    LoadTestFailed,
    Server,
    free_ports,
    spending,
)


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


def add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    """The flags `--onnx`, `--threads` and `--sentences`."""
    stored = default_root(ENVIRONMENT) / ONNX
    parser.add_argument("--onnx", type=Path, default=stored, metavar="FILE")
    parser.add_argument(
        "--threads",
        type=rounds.positive,
        default=2,
        metavar="N",
        help="threads of ONNX Runtime outside of the gateway (default: %(default)s)",
    )
    parser.add_argument("--sentences", type=rounds.positive, default=1024, metavar="N")


HERE = Path(__file__).parents[1]
OURS = HERE.parent / "model_repository"
TEMPLATE = HERE / "triton_encoder"
SHARED = (HERE / "triton_models", HERE / "python_models")
ONNX = "all-minilm-l6-v2-onnx/model.onnx"
ENSEMBLE, ENCODER = "embed_text", "minilm"
STEPS = ("tokenizer", "pooling")
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Each is one token."""
PINNED = 'parameters { key: "cpu_pinning" value { string_value: "1" } }\n'
WITH_PACKAGES = """import sys

sys.path.append({packages!r})
from own import TritonPythonModel  # noqa: E402
"""


def of_gateway(folder: Path) -> Path:
    """The repository for the gateway: minilm of the ensemble is on ONNX Runtime."""
    _write_shared(folder)
    write_encoder(folder)
    return folder


def write_encoder(folder: Path) -> None:
    """Add the encoder, pinned to its CPUs, to a repository for the gateway."""
    shutil.copytree(OURS / ENCODER, folder / ENCODER)
    with (folder / ENCODER / "config.pbtxt").open("a") as config:
        config.write(PINNED)


def of_triton(folder: Path, onnx: Path, threads: int) -> Path:
    """The repository for Triton: minilm of the ensemble is ONNX Runtime in a Python model.

    Its Python has no packages but numpy, so models find ours; model.py is the same.
    """
    _write_shared(folder)
    write_triton_encoder(folder, onnx, threads)
    _answer_hidden_states(folder / ENCODER / "config.pbtxt")
    for name in STEPS:
        (folder / name / "1" / "model.py").rename(folder / name / "1" / "own.py")
        text = WITH_PACKAGES.format(packages=str(packages()))
        (folder / name / "1" / "model.py").write_text(text)
    replace(folder / "tokenizer" / "config.pbtxt", '"all-minilm-l6-v2-onnx"', f'"{onnx.parent}"')
    return folder


def with_ensemble(folder: Path) -> Path:
    """A repository for the gateway with the ensemble and its models only."""
    for name in (ENSEMBLE, ENCODER, *STEPS):
        shutil.copytree(OURS / name, folder / name)
    return folder


def texts(count: int) -> list[str]:
    """Texts of log-normal lengths, always the same."""
    random_ = random.Random(SEED)
    return [" ".join(random_.choices(WORDS, k=length)) for length in lengths(count)]


def write_texts(path: Path, count: int) -> None:
    """A file for perf_analyzer's `--input-data` with these texts."""
    data = [{"text": {"content": [text], "shape": [1]}} for text in texts(count)]
    path.write_text(json.dumps({"data": data}))


def _write_shared(folder: Path) -> None:
    models = [model for each in SHARED for model in each.iterdir() if model.is_dir()]
    for model in (*models, *(OURS / name for name in (ENSEMBLE, *STEPS))):
        shutil.copytree(model, folder / model.name)


def _answer_hidden_states(config: Path) -> None:
    """Replace the output of the template, the embedding, by the input of the pooling model."""
    replace(
        config,
        r'"sentence_embedding" data_type: TYPE_FP32 dims: \[',
        ('"last_hidden_state" data_type: TYPE_FP32 dims: [ -1,'),
    )


def replace(file: Path, pattern: str, by: str) -> None:
    """Replace the one match of a pattern in a file; LoadTestFailed unless there is one."""
    text, found = re.subn(pattern, lambda _: by, file.read_text())
    if found != 1:
        raise LoadTestFailed(f"{file} has {found} matches of {pattern!r}, expected 1")
    file.write_text(text)


def write_triton_encoder(folder: Path, onnx: Path, threads: int) -> Path:
    """Add the encoder to a repository for Triton; LoadTestFailed without the ONNX file."""
    if not onnx.exists():
        raise LoadTestFailed(f"{onnx} does not exist; `sluice fetch` makes it")
    shutil.copytree(TEMPLATE, folder / ENCODER)
    config = folder / ENCODER / "config.pbtxt"
    said = {"model": str(onnx), "packages": str(packages()), "threads": str(threads)}
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in said.items()
    ]
    config.write_text("\n".join([config.read_text(), *lines, ""]))
    return folder


def packages() -> Path:
    """The folder of onnxruntime, which Triton's Python lacks."""
    found = find_spec("onnxruntime")
    if found is None or found.origin is None:
        raise LoadTestFailed("onnxruntime is not installed")
    return Path(found.origin).parent.parent


SHORTEST, LONGEST = 8, 256
MEAN = 64
SIGMA = 0.75
"""Of the logarithm: half of the requests have fewer than 48 tokens, one in twenty more than 166."""
SEED = 20261120
FIRST_ID, LAST_ID = 1000, 29000
"""Ordinary words of the vocabulary."""


def lengths(count: int) -> list[int]:
    """Log-normal lengths with a mean of MEAN, those outside of the range moved to its ends."""
    random_ = random.Random(SEED)
    mu = math.log(MEAN) - SIGMA**2 / 2
    drawn = (random_.lognormvariate(mu, SIGMA) for _ in range(count))
    return [min(max(round(each), SHORTEST), LONGEST) for each in drawn]


def sentences(count: int) -> list[list[int]]:
    """Token ids, the same at every call."""
    random_ = random.Random(SEED)
    return [[random_.randint(FIRST_ID, LAST_ID) for _ in range(each)] for each in lengths(count)]


def write_input_data(path: Path, found: Sequence[Sequence[int]], pad_to: int = 0) -> None:
    """A file for perf_analyzer's `--input-data`: one request for each sentence.

    With `pad_to` every sentence is padded to that many tokens, and masked.
    """
    data = [_request(each, pad_to or len(each)) for each in found]
    path.write_text(json.dumps({"data": data}))


def _request(ids: Sequence[int], length: int) -> dict[str, object]:
    padding = [0] * (length - len(ids))
    columns = {
        "input_ids": [*ids, *padding],
        "attention_mask": [1] * len(ids) + padding,
        "token_type_ids": [0] * length,
    }
    return {name: {"content": values, "shape": [length]} for name, values in columns.items()}


WINDOWS = 3
"""The windows of one measurement."""
STABLE_PERCENT = 900
"""Unstable measurements count, because rounds and medians make figures steady."""
START_SECS = 30.0
PATIENCE = 5.0
"""The time limit as a multiple of the windows, without the start; it sometimes hangs."""
TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests to one model over one wire (`http` or `grpc`) by concurrent clients.

    With 0 clients the `extra` flags give the load. Clients send the API key, if there is one.
    """

    model: str
    wire: str
    clients: int
    extra: Sequence[str] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of perf_analyzer, and its own processor time as a share of one core."""

    per_sec: float
    p50_us: float
    p99_us: float
    client_cores: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags `--triton`, `--perf-analyzer` and `--window-secs`."""
    add_triton_flag(parser)
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


def measure_costs(
    asked: argparse.Namespace, traffic: Traffic, line: Line, server: Server
) -> Mapping[Metric, float]:
    """Put the traffic on a server; the processor time is that of each request it has counted."""
    before = _served(server, traffic)
    with spending(server.pid) as spent:
        found = measure(asked, traffic, server)
    served = _served(server, traffic) - before
    return {
        **line.costs(found.per_sec, spent.secs / served * 1e6),
        line.lower("p50", "us"): found.p50_us,
        line.lower("p99", "us"): found.p99_us,
        line.other("CPU of the client", "cores"): found.client_cores,
    }


def _served(server: Server, traffic: Traffic) -> int:
    """The requests that a server has answered, by its statistics; those of the warm-up too."""
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/{traffic.model}/stats"
    with urlopen(Request(url, headers={"x-api-key": traffic.key}), timeout=10) as response:
        (found,) = json.load(response)["model_stats"]
    return int(found["inference_stats"]["success"]["count"])


def measure(asked: argparse.Namespace, traffic: Traffic, server: Server) -> Measurement:
    """Put the traffic on a server.

    LoadTestFailed with the output of perf_analyzer if it fails, and if it hangs in each try.
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
        *(("-H", f"x-api-key:{traffic.key}") if traffic.key else ()),
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
