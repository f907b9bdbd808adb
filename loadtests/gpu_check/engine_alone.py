"""vLLM's engine called directly, in this process: the rate that no server before it can beat."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvloop
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from loadtests.generation_figures import PROMPT_WORDS, WARM_UP_SEED
from loadtests.generation_load import Load, Outcome
from loadtests.prompts import prompts
from loadtests.rounds import LoadTestFailed
from loadtests.sse import Timing


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
