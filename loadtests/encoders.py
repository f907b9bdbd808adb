"""Sentences of many lengths through an encoder: the gateway, Triton, and ONNX Runtime alone.

All run the same ONNX file. Triton's batcher combines requests of one shape only, so its clients
either pad every sentence to the longest, or send true lengths that hardly ever share a batch. ONNX
Runtime alone gets all sentences at once, sorted by length, in batches of the best size: an upper
limit for every server.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import orjson
from rich.console import Console

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests.support import perf_analyzer, rounds, servers
from loadtests.support.perf_analyzer import Traffic
from loadtests.support.repositories import ENCODER, repository, write_encoder
from loadtests.support.rounds import Better, LoadTestFailed, Metric, Results, save, standings
from loadtests.support.servers import Contender, pinned, serving
from loadtests.support.texts import LONGEST, sentences, write_input_data

MODEL = ENCODER
ONNX = "all-minilm-l6-v2-onnx/model.onnx"
ALONE = "ONNX Runtime alone"
PADDED = f"triton, padded to {LONGEST}"
TRUE = "triton, true lengths"

TOKEN_BUDGETS = (128, 256, 512, 1024, 2048)
"""Batch sizes to try, in padded tokens."""
OUTPUT = "sentence_embedding"
PRINT_RATES = "from loadtests.encoders import print_rates; print_rates()"

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Measured:
    """A contender, and the file with the requests that it gets."""

    contender: Contender
    data: Path


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    with (
        rounds.failures_as_lines("encoders"),
        pinned(asked.client_cpus),
        tempfile.TemporaryDirectory() as folder,
    ):
        results = _run(asked, _measured(asked, Path(folder)), console)
    names = [name for name in (PADDED, TRUE, ALONE, servers.GATEWAY) if results.has(name)]
    title = f"{MODEL}, {asked.clients} clients, lengths 8 to {LONGEST}"
    console.print(standings(title, results, names))
    rounds.tell_file(save("encoders", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.encoders", description=__doc__)
    servers.add_triton_flag(parser)
    parser.add_argument(
        "--onnx", type=Path, default=default_root(ENVIRONMENT) / ONNX, metavar="FILE"
    )
    parser.add_argument("--clients", type=rounds.positive, default=32, metavar="N")
    parser.add_argument("--sentences", type=rounds.positive, default=1024, metavar="N")
    parser.add_argument(
        "--threads",
        type=rounds.positive,
        default=2,
        metavar="N",
        help="threads of ONNX Runtime, in Triton and alone (default: %(default)s)",
    )
    perf_analyzer.add_flags(parser)
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    parser.set_defaults(window_secs=6.0)
    return parser


def _measured(asked: argparse.Namespace, folder: Path) -> Sequence[Measured]:
    """The servers; the gateway comes last."""
    found = sentences(asked.sentences)
    true, padded = folder / "true.json", folder / "padded.json"
    write_input_data(true, found)
    write_input_data(padded, found, LONGEST)
    ours = folder / "gateway"
    write_encoder(ours)
    _serve_embeddings_only(ours / MODEL / "config.pbtxt")
    measured = [Measured(servers.gateway(ours), true)]
    if asked.triton:
        theirs = repository(folder / "triton", MODEL, asked.onnx, asked.threads)
        for name, data in ((TRUE, true), (PADDED, padded)):
            launch = servers.triton(asked.triton, theirs).launch
            measured.insert(0, Measured(Contender(name, launch), data))
    return measured


def _serve_embeddings_only(config: Path) -> None:
    """perf_analyzer asks for every output that there is; Triton's model has the embedding only."""
    text, found = re.subn(r',\s*\{ name: "last_hidden_state".*?\}', "", config.read_text())
    if found != 1:
        raise LoadTestFailed(f"{config} has another form than expected")
    config.write_text(text)


def _run(asked: argparse.Namespace, measured: Sequence[Measured], console: Console) -> Results:
    results = Results()
    alone = partial(best_rate, asked.onnx, asked.threads, sentences(asked.sentences))
    with rounds.progress_bar(console) as bar:
        task = bar.add_task("", total=asked.rounds * (len(measured) + 1))
        for number in range(1, asked.rounds + 1):
            for each in measured:
                bar.update(task, description=f"round {number}: {each.contender.name}")
                results.add(each.contender.name, _serve(asked, each))
                bar.advance(task)
            bar.update(task, description=f"round {number}: {ALONE}")
            results.add(ALONE, {_rate(asked): alone()})
            bar.advance(task)
    return results


def _serve(asked: argparse.Namespace, each: Measured) -> Mapping[Metric, float]:
    traffic = Traffic(
        model=MODEL, wire="http", clients=asked.clients, extra=("--input-data", str(each.data))
    )
    with serving(each.contender.launch(), asked.server_cpus) as server:
        found = perf_analyzer.measure(asked, traffic, server)
    return {
        _rate(asked): found.per_sec,
        Metric("p50", asked.clients, "ms", Better.LOWER, "client"): found.p50_us / 1e3,
        Metric("p99", asked.clients, "ms", Better.LOWER, "client"): found.p99_us / 1e3,
        Metric("CPU of the client", asked.clients, "cores", noun="client"): found.client_cores,
    }


def _rate(asked: argparse.Namespace) -> Metric:
    return Metric("requests/s", asked.clients, "", Better.HIGHER, "client")


def best_rate(onnx: Path, threads: int, sentences: Sequence[Ids]) -> float:
    """Sentences per second at the best batch size, in a process of its own."""
    client = subprocess.run(
        [sys.executable, "-c", PRINT_RATES, str(onnx), str(threads)],
        input=orjson.dumps(list(sentences)),
        capture_output=True,
        check=False,
    )
    if client.returncode:
        raise LoadTestFailed(f"ONNX Runtime alone failed:\n{client.stderr.decode()}")
    return max(map(float, client.stdout.split()))


def print_rates() -> None:
    """Print sentences per second of each batch size; the sentences come as JSON."""
    onnx, threads = sys.argv[1:]
    sentences = sorted(orjson.loads(sys.stdin.buffer.read()), key=len)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    session.run([OUTPUT], _session_inputs(sentences[:8]))
    for budget in TOKEN_BUDGETS:
        began = time.perf_counter()
        for batch in _batches(sentences, budget):
            session.run([OUTPUT], _session_inputs(batch))
        sys.stdout.write(f"{len(sentences) / (time.perf_counter() - began)}\n")


def _batches(sentences: Sequence[Ids], budget: int) -> Iterator[Sequence[Ids]]:
    """Neighbours in length, as many as fit the budget."""
    batch: list[Ids] = []
    for each in sentences:
        if batch and len(each) * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(each)
    yield batch


def _session_inputs(batch: Sequence[Ids]) -> dict[str, npt.NDArray[np.int64]]:
    shape = (len(batch), max(map(len, batch)))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, each in enumerate(batch):
        ids[row, : len(each)] = each
        mask[row, : len(each)] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros(shape, np.int64)}


if __name__ == "__main__":
    main()
