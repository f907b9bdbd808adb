"""Loads of an LLM: against vLLM's own server, with small inferences, and around a tiny engine."""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

from rich.console import Console

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests.support import generation, pipeline, rounds, servers
from loadtests.support.generation import (
    CHAT,
    PROMPT_TOKENS,
    PROMPT_WORDS,
    TEXT,
    WARM_UP_SEED,
    Endpoint,
    Load,
    costs,
    gateway_defaults,
    line_of,
    prompts,
    put,
    read_model,
)
from loadtests.support.http_client import ADD_SUB_BODY, ADD_SUB_PATH, Address, posting
from loadtests.support.results import Line, Metric, Results, standings
from loadtests.support.rounds import Plan, Report, Step
from loadtests.support.servers import (
    CLIENTS,
    ENGINE,
    FRONTENDS,
    GATEWAY,
    SERVER,
    Contender,
    LoadTestFailed,
    Server,
    gateway,
    shared_out_bytes,
    spending,
)

HERE = Path(__file__).parent
REPOSITORY = HERE.parent / "model_repository"
MODEL, SMALL = "llama", "add_sub"
LAPTOP = "laptop"
"""The name of the config by which OpenVINO GenAI computes the model."""
FEWEST_REQUESTS = 4


def compare(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure the gateway and vLLM's own server, with the same model and engine arguments.

    With --laptop the last contender is the gateway with the model's config `laptop`, and its engine
    alone is measured after the rounds.
    """
    parser.add_argument("--model-repository", type=Path, default=REPOSITORY, metavar="DIR")
    parser.add_argument("--model", default=MODEL, metavar="NAME", help="a model of backend vllm")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="ask both by /v1/chat/completions, not by generate_stream and /v1/completions",
    )
    parser.add_argument("--laptop", action="store_true", help="measure the config `laptop`, too")
    parser.add_argument("--streams", type=rounds.positive_list, default=[1, 8, 32], metavar="N,N")
    parser.add_argument(
        "--max-tokens",
        type=rounds.positive,
        default=64,
        metavar="N",
        help="tokens of each answer (default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=rounds.positive,
        default=1,
        metavar="N",
        help="requests of each stream, one after the other (default: %(default)s, and at least "
        f"{FEWEST_REQUESTS} of all streams together)",
    )
    parser.add_argument(
        "--passes",
        type=rounds.positive,
        default=4,
        metavar="N",
        help="measurements of each load in a round, since a start takes long (default: "
        "%(default)s)",
    )
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _compare)


def _compare(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    model = asked.model_repository.resolve() / asked.model
    # A repository with the one model, so that others are not loaded.
    (folder / asked.model).symlink_to(model)
    contenders = [
        servers.vllm(asked.model, read_model(model, gateway_defaults()).flags),
        gateway(folder),
    ]
    endpoints = {**_endpoints(asked.model, chat=asked.chat)}
    if asked.laptop:
        contenders.append(gateway(folder, LAPTOP, f"--model-config-name={LAPTOP}"))
        endpoints[LAPTOP] = endpoints[GATEWAY]
    steps = {
        name: [*_load_steps(asked, endpoint), ("memory", _memory)]
        for name, endpoint in endpoints.items()
    }
    title = f"Generation, {asked.model}"
    results, report = rounds.compare_contenders(title, contenders, steps, asked, console)
    notes = list(_beside_the_pipeline(asked, results)) if asked.laptop else []
    return Report(report.table, report.lines, notes, _differing_prompts(results))


def _memory(server: Server) -> Mapping[Metric, float]:
    return {Line(MODEL, "server").lower("memory", "MB"): shared_out_bytes(server) / 1e6}


def _beside_the_pipeline(asked: argparse.Namespace, results: Results) -> Iterator[str]:
    """The gateway's tokens per second over those of the engine alone, with the same prompts."""
    settings = json.loads((asked.model_repository / asked.model / "1" / "laptop.json").read_text())
    weights = default_root(ENVIRONMENT) / settings.pop("model") / "model.gguf"
    for load in _loads(asked):
        found = [pipeline.tokens_per_sec(weights, settings, load) for _ in range(asked.rounds)]
        metric = line_of(CHAT if asked.chat else TEXT, load).rate
        ours, alone = results.median(metric, LAPTOP), statistics.median(found)
        yield (
            f"{metric}: the gateway {ours:.1f}, its engine alone {alone:.1f} ({ours / alone:.2f})"
        )


def _endpoints(model: str, *, chat: bool) -> Mapping[str, Endpoint]:
    """The endpoint of each server for the same requests."""
    if chat:
        return {
            "vllm": generation.chat(model, generation.VLLM_COUNTERS),
            GATEWAY: generation.chat(model, generation.GATEWAY_COUNTERS),
        }
    return {"vllm": generation.completions(model), GATEWAY: generation.generate(model)}


def _load_steps(asked: argparse.Namespace, endpoint: Endpoint) -> Sequence[Step]:
    warm_up = Load(max(asked.streams), 1, 16)
    loads = _loads(asked) * asked.passes
    return [
        ("warm-up", partial(generation.warm_up, endpoint, warm_up)),
        *(
            (f"{load.streams} streams", partial(generation.measure, endpoint, load, seed))
            for seed, load in enumerate(loads, WARM_UP_SEED + 1)
        ),
    ]


def _loads(asked: argparse.Namespace) -> list[Load]:
    return [
        Load(streams, max(asked.requests, -(-FEWEST_REQUESTS // streams)), asked.max_tokens)
        for streams in asked.streams
    ]


def _differing_prompts(results: Results) -> str:
    for metric, found in results.values.items():
        if metric.figure == PROMPT_TOKENS and len(set(chain(*found.values()))) > 1:
            return f"the servers read prompts of different lengths: {found}"
    return ""


ALONE, SHARED = "alone", "with inferences"


def beside(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure tokens per second of an LLM, alone and with small inferences at a steady rate."""
    parser.add_argument("--streams", type=rounds.positive, default=8, metavar="N")
    parser.add_argument("--requests", type=rounds.positive, default=4, metavar="N")
    parser.add_argument("--max-tokens", type=rounds.positive, default=64, metavar="N")
    parser.add_argument("--infer-rate", type=float, default=50.0, metavar="PER_SEC")
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _beside)


def _beside(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    (folder / MODEL).symlink_to((REPOSITORY / MODEL).resolve())
    (folder / SMALL).symlink_to((HERE / "models" / SMALL).resolve())
    load, found = Load(asked.streams, asked.requests, asked.max_tokens), Results()
    warm_up = Load(asked.streams, 1, 16)
    steps: Sequence[Step] = [
        ("warm-up", partial(generation.warm_up, generation.generate(MODEL), warm_up)),
        (ALONE, partial(_alone, load, found)),
        (SHARED, partial(_shared, load, found, asked.infer_rate)),
    ]
    rounds.run(Plan([gateway(folder)], {GATEWAY: steps}, asked.rounds, asked.server_cpus), console)
    title = f"{MODEL}, {asked.streams} streams, {asked.infer_rate:g} infer/s of {SMALL}"
    return Report(standings(title, found, [ALONE, SHARED]), found.as_lines())


def _alone(load: Load, found: Results, server: Server) -> Mapping[Metric, float]:
    found.add(ALONE, _tokens_per_sec(load, 1, server))
    return {}


def _shared(load: Load, found: Results, per_sec: float, server: Server) -> Mapping[Metric, float]:
    with inferring(Address(server.ports.http), per_sec) as took:
        rate = _tokens_per_sec(load, 2, server)
    line = line_of(TEXT, load)
    figures = {
        line.lower(f"infer p{percent}", "ms"): _percentile(took, percent) for percent in (50, 99)
    }
    found.add(SHARED, {**rate, **figures})
    return {}


def _tokens_per_sec(load: Load, seed: int, server: Server) -> Mapping[Metric, float]:
    encode, questions = generation.generate(MODEL).encode, prompts(PROMPT_WORDS, seed)
    with spending(server.pid) as spent:
        outcome = put(load, Address(server.ports.http), encode, questions)
    line = line_of(TEXT, load)
    return line.costs(load.tokens / outcome.secs, spent.secs / load.tokens * 1e6)


def _percentile(secs: Sequence[float], percent: int) -> float:
    return statistics.quantiles(secs, n=100, method="inclusive")[percent - 1] * 1e3


@contextmanager
def inferring(address: Address, per_sec: float) -> Iterator[Sequence[float]]:
    """Send requests to add_sub at a rate during the block; seconds from due time to response.

    LoadTestFailed if a request is refused.
    """
    took: list[float] = []
    stop = Event()
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(_ask, address, per_sec, took, stop)
        try:
            yield took
        finally:
            stop.set()
        asking.result()


def _ask(address: Address, per_sec: float, took: list[float], stop: Event) -> None:
    due = time.perf_counter()
    with posting(address, ADD_SUB_PATH, ADD_SUB_BODY) as send:
        while not stop.wait(max(0.0, due - time.perf_counter())):
            send()
            took.append(time.perf_counter() - due)
            due += 1 / per_sec


STORED = "smollm2-135m-instruct"
"""The model of the repository, with the tokenizer and chat template of the tiny one."""

TINY = {
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
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
}
KINDS = {CHAT: True, TEXT: False}


def small_llm(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure processor time per token around an engine with one layer of random weights.

    Most of the time is that of the server, its `--frontends`, and the clients of the engine.
    """
    parser.add_argument("--streams", type=rounds.positive_list, default=[64, 256], metavar="N,N")
    parser.add_argument("--max-tokens", type=rounds.positive, default=128, metavar="N")
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="number of frontends and of clients of the engine; 0: without (default: %(default)s)",
    )
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _small_llm)


def _small_llm(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    contenders = _processes(folder, asked.processes)
    steps = {each.name: _token_steps(asked, each.name) for each in contenders}
    title = "A token of a small LLM"
    return rounds.compare_contenders(title, contenders, steps, asked, console)[1]


def _processes(folder: Path, count: int) -> Sequence[Contender]:
    """vLLM's own server, and the gateway alone, with frontends, and with clients of the engine."""
    several, one = folder / "several", folder / "one"
    write_tiny_model(several / MODEL, ARGUMENTS)
    write_tiny_model(one / MODEL, {**ARGUMENTS, "api_server_count": 1})
    alone = (servers.vllm(MODEL, read_model(several / MODEL).flags), gateway(one))
    if not count:
        return alone
    flag = f"--frontends={count}"
    return (
        *alone,
        gateway(one, f"{count} frontends", flag),
        gateway(several, f"{count} frontends, {count} clients", flag),
    )


def missing_model() -> str:
    """The reason why there is no model to serve, or to take the tokenizer of; "" for none."""
    if (default_root(ENVIRONMENT) / STORED / "config.json").is_file():
        return ""
    return f"the model is not stored: run `sluice fetch {STORED}`"


def write_tiny_model(folder: Path, arguments: Mapping[str, Any]) -> None:
    """A folder of a model of vLLM with one layer of random weights."""
    if lacking := missing_model():
        raise LoadTestFailed(lacking)
    stored = default_root(ENVIRONMENT) / STORED
    small = folder / "1" / "small"
    small.mkdir(parents=True)
    for file in chain(stored.glob("*token*"), stored.glob("*.jinja"), stored.glob("vocab*")):
        shutil.copy(file, small)
    config = json.loads((stored / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | TINY))
    (folder / "1" / "model.json").write_text(json.dumps(arguments))
    (folder / "config.pbtxt").write_text('backend: "vllm"\n')


def _token_steps(asked: argparse.Namespace, server: str) -> Sequence[Step]:
    found = []
    for kind, chat in KINDS.items():
        endpoints = _endpoints(MODEL, chat=chat)
        endpoint = endpoints.get(server, endpoints[GATEWAY])
        found += [
            (f"{kind}, {streams} streams", partial(_cost, endpoint, streams, asked))
            for streams in asked.streams
        ]
    return found


def _cost(
    endpoint: Endpoint, streams: int, asked: argparse.Namespace, server: Server
) -> Mapping[Metric, float]:
    address, words = Address(server.ports.http), prompts(16, streams)
    put(Load(streams, 1, 32), address, endpoint.encode, words)
    load = Load(streams, 2, asked.max_tokens)
    with spending(server.pid) as spent:
        outcome = put(load, address, endpoint.encode, words)
    line = line_of(endpoint.kind, load)
    parts = {
        "processor time of the server": [SERVER],
        "processor time of frontends and clients": [FRONTENDS, CLIENTS],
        "processor time of the engine": [ENGINE],
    }
    return {
        line.rate: load.tokens / outcome.secs,
        **costs(line, load, spent),
        **{
            line.lower(part, "us/token"): spent.secs_of(*roles) / load.tokens * 1e6
            for part, roles in parts.items()
        },
    }
