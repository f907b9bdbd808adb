"""vLLM with a tiny model: tokens per second against its engine alone, and a killed engine."""

import asyncio
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
import uvloop
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm import AsyncEngineArgs, SamplingParams
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from loadtests.gpu_check.check import Row
from loadtests.gpu_check.parts import CUDA, Asked
from loadtests.support import generation, servers
from loadtests.support.generation import (
    PROMPT_WORDS,
    WARM_UP_SEED,
    WORDS,
    Endpoint,
    Load,
    Outcome,
    ask_once,
    figures,
    measure,
    prompts,
    warm_up,
)
from loadtests.support.http_client import Address, StreamFailed, Timing
from loadtests.support.results import Better, Metric, Results
from loadtests.support.servers import (
    Cpus,
    LoadTestFailed,
    Server,
    descendants,
    name_of,
    read_metrics,
    serving,
    total,
)

NAME = "tiny"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
PROMPTED = (UNKNOWN, BEGIN, END, "Words", ":", *dict.fromkeys(WORDS))
VOCABULARY = (*PROMPTED, *(f"word{number}" for number in range(len(PROMPTED), 4096)))
"""The words of prompts, and more, up to the size of a small model's vocabulary."""
LONGEST = 16384
GIB = 1 << 30
CONFIG = """
backend: "vllm"
instance_group [ { kind: KIND_MODEL } ]
"""


def write_repository(folder: Path, asked: Asked) -> Path:
    """A repository with the model NAME of backend vllm, with its weights."""
    version = folder / NAME / "1"
    _write_model(version / NAME)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.json").write_text(json.dumps(_arguments(asked)))
    return folder


def engine_arguments(repository: Path, asked: Asked) -> Mapping[str, Any]:
    """The arguments of an engine alone that serves the same model."""
    return {**_arguments(asked), "model": str(repository / NAME / "1" / NAME)}


def _arguments(asked: Asked) -> Mapping[str, Any]:
    on_gpu = asked.device == CUDA
    return {
        "model": NAME,
        "dtype": "bfloat16",
        "max_model_len": LONGEST,
        "max_num_seqs": max(8, *asked.streams),
        "kv_cache_memory_bytes": 4 * GIB if on_gpu else GIB // 2,
        # A CPU would compile for minutes without these arguments.
        **({} if on_gpu else {"enforce_eager": True, "max_num_batched_tokens": 2048}),
    }


def _write_model(folder: Path) -> None:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        bos_token_id=VOCABULARY.index(BEGIN),
        eos_token_id=VOCABULARY.index(END),
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END
    ).save_pretrained(folder)


ALONE = "alone"
FEWEST_REQUESTS = 16
WARM_UP_TOKENS = 16


def check_generation(asked: Asked) -> Sequence[Row]:
    """The same prompts to the engine alone and then to the gateway."""
    first = Load(max(asked.streams), 1, WARM_UP_TOKENS)
    loads = [
        Load(streams, max(2, -(-FEWEST_REQUESTS // streams)), asked.max_tokens)
        for streams in asked.streams
    ]
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        repository = write_repository(Path(folder), asked)
        alone = put_all(engine_arguments(repository, asked), first, loads)
        for load, outcome in zip(loads, alone, strict=True):
            results.add(ALONE, figures(outcome, load, generation.TEXT))
        _measure_gateway(repository, first, loads, results)
    return [
        _metric_row(metric, results) for metric, found in results.values.items() if ALONE in found
    ]


def _measure_gateway(
    repository: Path, first: Load, loads: Sequence[Load], results: Results
) -> None:
    endpoint = generation.generate(NAME)
    with serving(servers.gateway(repository).launch(), Cpus()) as server:
        warm_up(endpoint, first, server)
        for seed, load in enumerate(loads, WARM_UP_SEED + 1):
            results.add(servers.GATEWAY, measure(endpoint, load, seed, server))


def _metric_row(metric: Metric, results: Results) -> Row:
    return Row(
        name=str(metric),
        gateway=results.median(metric, servers.GATEWAY),
        alone=results.median(metric, ALONE) if metric.better is not Better.NEITHER else None,
        better=metric.better,
    )


def put_all(
    arguments: Mapping[str, Any], warm_up: Load, loads: Sequence[Load]
) -> Sequence[Outcome]:
    """Start an engine, run the loads in turn, and stop it.

    Its processes are spawned, as the gateway's: a fork of a process that has computed with Torch
    hangs at its first computation on the CPU.
    """
    cli_env_setup()
    return uvloop.run(_put_all(arguments, warm_up, loads))


async def _put_all(
    arguments: Mapping[str, Any], warm_up: Load, loads: Sequence[Load]
) -> Sequence[Outcome]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    ids = map(str, itertools.count())
    try:
        await _put(engine, warm_up, WARM_UP_SEED, ids)
        return [
            await _put(engine, load, seed, ids) for seed, load in enumerate(loads, WARM_UP_SEED + 1)
        ]
    finally:
        engine.shutdown()


async def _put(engine: Any, load: Load, seed: int, ids: Iterator[str]) -> Outcome:
    texts = prompts(PROMPT_WORDS, seed)
    cpu_began, began = time.process_time(), time.perf_counter()

    async def stream(asked: Sequence[str]) -> Sequence[Timing]:
        return [await _generate(engine, text, load.max_tokens, next(ids)) for text in asked]

    found = await asyncio.gather(
        *(stream([next(texts) for _ in range(load.requests)]) for _ in range(load.streams))
    )
    used = time.process_time() - cpu_began
    timings = list(itertools.chain.from_iterable(found))
    return Outcome(timings, used / (time.perf_counter() - began))


async def _generate(engine: Any, text: str, max_tokens: int, request_id: str) -> Timing:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    timing, tokens = Timing(time.perf_counter()), 0
    async for output in engine.generate(text, sampling, request_id):
        timing.arrivals.append(time.perf_counter())
        tokens += len(output.outputs[0].token_ids)
    if tokens != max_tokens:
        raise LoadTestFailed(f"the engine made {tokens} tokens, expected {max_tokens}")
    return timing


STREAMS = 8
TOKENS = LONGEST - 2 * PROMPT_WORDS
RUNNING = "vllm:num_requests_running"
ENGINE = "VLLM::Engine"
NOT_READY = 400
"""The status of Triton for a server that is not ready."""
CLEAR = "engine has stopped"
KNOWN_SECS = 2.0
"""The limit for noticing a dead engine (gateway/README.md, When an engine dies)."""
PATIENCE_SECS = 240.0
POLL_SECS = 0.02


def check_engine_death(asked: Asked) -> Sequence[Row]:
    """Errors of all requests in flight at a kill of the engine, and the time until it serves."""
    with tempfile.TemporaryDirectory() as folder:
        repository = write_repository(Path(folder), asked)
        with serving(servers.gateway(repository).launch(), Cpus()) as server:
            return asyncio.run(_kill_engine(server, generation.generate(NAME)))


async def _kill_engine(server: Server, endpoint: Endpoint) -> Sequence[Row]:
    requests = asyncio.create_task(_ask_all(server, endpoint))
    await _until("all requests run", lambda: _running(server) >= STREAMS)
    os.kill(_engine(server), signal.SIGKILL)
    killed = time.monotonic()
    gone = await _until("it is not ready", lambda: not _is_ready(server), killed)
    errors = await requests
    reported = time.monotonic() - killed
    back = await _until("it is ready again", lambda: _is_ready(server), killed)
    await asyncio.to_thread(warm_up, endpoint, Load(STREAMS, 1, 16), server)
    clear = sum(CLEAR in each for each in errors)
    return [
        _time_row("not ready after the kill, s", gone, KNOWN_SECS),
        Row(
            name=f"requests that got the reason, of {STREAMS}",
            gateway=clear,
            ok=clear == STREAMS,
            expected=f"{STREAMS} with '{CLEAR}'" + ("" if clear == STREAMS else f", got {errors}"),
        ),
        _time_row("all of them got it after, s", reported, KNOWN_SECS),
        _time_row(f"serves {STREAMS} requests again after, s", back, PATIENCE_SECS),
    ]


def _time_row(name: str, secs: float, limit_secs: float) -> Row:
    return Row(name=name, gateway=secs, ok=secs <= limit_secs, expected=f"at most {limit_secs:g}")


async def _ask_all(server: Server, endpoint: Endpoint) -> Sequence[str]:
    """The error of each request; LoadTestFailed if one has an answer."""
    address, texts = Address(server.ports.http), prompts(PROMPT_WORDS, 1)
    ended = await asyncio.gather(
        *(ask_once(address, endpoint.encode(address, next(texts), TOKENS)) for _ in range(STREAMS)),
        return_exceptions=True,
    )
    if answered := [each for each in ended if not isinstance(each, StreamFailed)]:
        raise LoadTestFailed(f"{len(answered)} requests did not fail: {answered[0]!r:.200}")
    return [str(each) for each in ended]


async def _until(what: str, condition: Callable[[], bool], since: float | None = None) -> float:
    """Seconds until a condition holds, from now or from `since`."""
    began = time.monotonic() if since is None else since
    while not await asyncio.to_thread(condition):
        if time.monotonic() - began > PATIENCE_SECS:
            raise LoadTestFailed(f"not within {PATIENCE_SECS:g} s: {what}")
        await asyncio.sleep(POLL_SECS)
    return time.monotonic() - began


def _running(server: Server) -> float:
    return total(read_metrics(server.ports.metrics), RUNNING)


def _engine(server: Server) -> int:
    engines = [pid for pid in descendants(server.pid) if name_of(pid).startswith(ENGINE)]
    if len(engines) != 1:
        names = [name_of(pid) for pid in descendants(server.pid)]
        raise LoadTestFailed(f"expected one process {ENGINE}..., found {names}")
    return engines[0]


def _is_ready(server: Server) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{server.ports.http}/v2/health/ready", timeout=5) as found:
            return bool(found.status == 200)
    except HTTPError as error:
        if error.code != NOT_READY:
            raise LoadTestFailed(f"ready answers {error.code}, expected 200 or 400") from None
        return False
