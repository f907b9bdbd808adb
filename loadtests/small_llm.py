"""A tiny LLM: processor time per token in the server and its other processes.

The engine is vLLM's, its model has one layer of random weights. So most of the time is that of
processes of the gateway: the server, its `--frontends`, and the clients of the engine.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests.frontends import ENGINE, SERVER, spent_secs
from loadtests.support import generation, rounds, servers
from loadtests.support.generation import Door, Load, put, read_model
from loadtests.support.http_client import Address
from loadtests.support.rounds import Better, LoadTestFailed, Metric, Plan, Step, comparison, save
from loadtests.support.servers import Contender, Server, pinned
from loadtests.support.texts import prompts

MODEL = "llama"
STORED = "smollm2-135m-instruct"
"""The model with the tokenizer and chat template of the tiny one."""

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "head_dim": 64,
}
ARGUMENTS = {
    "model": "small",
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
}
WARM_UP_TOKENS = 32
PROMPT_WORDS = 16
KINDS = ("chat", "text")


def main() -> None:
    """Compare, print and save."""
    asked = _parser().parse_args()
    console = Console()
    with (
        rounds.failures_as_lines("small_llm"),
        pinned(asked.client_cpus),
        tempfile.TemporaryDirectory() as folder,
        _servers(Path(folder), asked.processes) as servers,
    ):
        steps = {each.name: _steps(asked, each.name) for each in servers}
        results = rounds.run(Plan(servers, steps, asked.rounds, asked.server_cpus), console)
        names = [each.name for each in servers]
        console.print(comparison("A token of a small LLM", results, names))
        rounds.tell_file(save("small_llm", vars(asked), results.as_rows()), console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.small_llm", description=__doc__)
    parser.add_argument("--streams", type=rounds.positive_list, default=[64, 256], metavar="N,N")
    parser.add_argument("--max-tokens", type=rounds.positive, default=128, metavar="N")
    parser.add_argument(
        "--processes",
        type=rounds.positive,
        default=2,
        metavar="N",
        help="number of frontends and of clients of the engine (default: %(default)s)",
    )
    rounds.add_flags(parser)
    servers.add_cpu_flags(parser)
    return parser


@contextmanager
def _servers(folder: Path, processes: int) -> Iterator[Sequence[Contender]]:
    """vLLM's own server, and the gateway alone, with frontends, and with clients of the engine."""
    stored = default_root(ENVIRONMENT) / STORED
    if not (stored / "config.json").is_file():
        raise LoadTestFailed(f"the model is not stored: run `sluice fetch {STORED}`")
    several, one = folder / "several", folder / "one"
    _write_model(several / MODEL, stored, ARGUMENTS)
    _write_model(one / MODEL, stored, {**ARGUMENTS, "api_server_count": 1})
    flag = f"--frontends={processes}"
    yield (
        servers.vllm(MODEL, read_model(several / MODEL).flags),
        servers.gateway(one),
        servers.gateway(one, f"{processes} frontends", flag),
        servers.gateway(several, f"{processes} frontends, {processes} clients", flag),
    )


def _write_model(folder: Path, stored: Path, arguments: Mapping[str, Any]) -> None:
    small = folder / "1" / "small"
    small.mkdir(parents=True)
    for file in chain(stored.glob("*token*"), stored.glob("*.jinja"), stored.glob("vocab*")):
        shutil.copy(file, small)
    config = json.loads((stored / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | SMALL))
    (folder / "1" / "model.json").write_text(json.dumps(arguments))
    (folder / "config.pbtxt").write_text('backend: "vllm"\n')


def _steps(asked: argparse.Namespace, server: str) -> Sequence[Step]:
    return [
        (f"{kind}, {streams} streams", partial(_step, kind, door, streams, asked.max_tokens))
        for kind, door in zip(KINDS, _doors(server), strict=True)
        for streams in asked.streams
    ]


def _doors(server: str) -> Sequence[Door]:
    if server == "vllm":
        return generation.chat(MODEL, generation.VLLM_COUNTERS), generation.completions(MODEL)
    return generation.chat(MODEL, generation.GATEWAY_COUNTERS), generation.generate(MODEL)


def _step(
    kind: str, door: Door, streams: int, max_tokens: int, server: Server
) -> Mapping[Metric, float]:
    address, words = Address(server.ports.http), prompts(PROMPT_WORDS, streams)
    put(Load(streams, 1, WARM_UP_TOKENS), address, door.encode, words)
    load, before = Load(streams, 2, max_tokens), spent_secs(server)
    outcome = put(load, address, door.encode, words)
    after = spent_secs(server)
    used = {role: (secs - before.get(role, 0)) / load.tokens for role, secs in after.items()}
    others = sum(secs for role, secs in used.items() if role not in (SERVER, ENGINE))

    def cost(whose: str, secs: float) -> Mapping[Metric, float]:
        return {Metric(f"{kind}: CPU of {whose}", streams, "us/token", Better.LOWER): secs * 1e6}

    rate = Metric(f"{kind}, tokens/s", streams, "", Better.HIGHER)
    return {
        rate: load.tokens / outcome.secs,
        **cost("the server", used[SERVER]),
        **cost("frontends and clients", others),
        **cost("the engine", used[ENGINE]),
    }


if __name__ == "__main__":
    main()
