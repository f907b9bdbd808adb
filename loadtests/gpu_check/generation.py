"""Tokens per second of vLLM: from the gateway over SSE, and from the engine without a server."""

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from loadtests.gpu_check.outcome import Row
from loadtests.gpu_check.parts import CUDA, Asked
from loadtests.support import generation, servers
from loadtests.support.generation import (
    PROMPT_TOKENS,
    PROMPT_WORDS,
    WARM_UP_SEED,
    Load,
    Outcome,
    figures,
    measure,
    warm_up,
)
from loadtests.support.http_client import Timing
from loadtests.support.rounds import Better, LoadTestFailed, Metric, Results
from loadtests.support.servers import Cpus, serving
from loadtests.support.texts import WORDS, prompts

NAME = "tiny"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
PROMPTED = (UNKNOWN, BEGIN, END, "Words", ":", *dict.fromkeys(WORDS))
VOCABULARY = (*PROMPTED, *(f"word{number}" for number in range(len(PROMPTED), 4096)))
"""What prompts are made of, and as many words more as a small model's vocabulary has."""
LONGEST = 16384
GIB = 1 << 30
CONFIG = """
backend: "vllm"
instance_group [ { kind: KIND_MODEL } ]
"""


def write_repository(folder: Path, asked: Asked) -> Path:
    """A repository with the model NAME of backend vllm, whose weights lie in its version."""
    version = folder / NAME / "1"
    _write_model(version / NAME)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.json").write_text(json.dumps(_arguments(asked)))
    return folder


def engine_arguments(repository: Path, asked: Asked) -> Mapping[str, Any]:
    """What an engine alone is started with, to serve the same."""
    return {**_arguments(asked), "model": str(repository / NAME / "1" / NAME)}


def _arguments(asked: Asked) -> Mapping[str, Any]:
    on_gpu = asked.device == CUDA
    return {
        "model": NAME,
        "dtype": "bfloat16",
        "max_model_len": LONGEST,
        "max_num_seqs": max(8, *asked.streams),
        "kv_cache_memory_bytes": 4 * GIB if on_gpu else GIB // 2,
        # Without these a CPU would compile for minutes; on a GPU they are what is measured.
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


def check(asked: Asked) -> Sequence[Row]:
    """The same prompts to both; the one is stopped before the other is started."""
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
            results.add(ALONE, figures(outcome, load))
        _measure_gateway(repository, first, loads, results)
    return [_row(metric, results) for metric in results.values if metric.name != PROMPT_TOKENS]


def _measure_gateway(
    repository: Path, first: Load, loads: Sequence[Load], results: Results
) -> None:
    door = generation.generate(NAME)
    with serving(servers.gateway(repository).launch(), Cpus()) as server:
        warm_up(door, first, server)
        for seed, load in enumerate(loads, WARM_UP_SEED + 1):
            results.add(servers.GATEWAY, measure(door, load, seed, server))


def _row(metric: Metric, results: Results) -> Row:
    return Row(
        name=str(metric),
        gateway=results.median(metric, servers.GATEWAY),
        alone=results.median(metric, ALONE) if metric.better is not Better.NEITHER else None,
        better=metric.better,
    )


def put_all(
    arguments: Mapping[str, Any], warm_up: Load, loads: Sequence[Load]
) -> Sequence[Outcome]:
    """Start an engine, put the loads on it one after the other, and stop it."""
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
        return [await _ask(engine, text, load.max_tokens, next(ids)) for text in asked]

    found = await asyncio.gather(
        *(stream([next(texts) for _ in range(load.requests)]) for _ in range(load.streams))
    )
    used = time.process_time() - cpu_began
    timings = list(itertools.chain.from_iterable(found))
    return Outcome(timings, used / (time.perf_counter() - began))


async def _ask(engine: Any, text: str, max_tokens: int, request_id: str) -> Timing:
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
