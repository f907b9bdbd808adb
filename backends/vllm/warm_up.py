"""What does an engine compile in a request's first step? All of it before its model is ready."""

import logging
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from backends.vllm.engine_request import EngineRequest
from backends.vllm.failures import REFUSALS
from backends.vllm.prompt import PromptRenderer

log = logging.getLogger("sluice.vllm")

GENERATE = "generate"
ANY_TOKEN = [0]


async def warm_up(engine: Any, prompts: PromptRenderer, *, model: str) -> None:
    """Have an engine that generates make one token with its log probability.

    Ranking log probabilities (`batched_count_greater_than`) is compiled when the first request
    asks for them: for some seconds, in a step that all requests share. Which token it is does
    not matter, nor is it a failure if the model takes no such prompt.
    """
    parameters = SamplingParams(
        max_tokens=1, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    try:
        async with EngineRequest(engine, f"{model}-warm-up", _wasted) as running:
            await running.submit(await prompts.render_prompt(ANY_TOKEN), parameters)
            while not running.finished:
                await running.next()
    except REFUSALS as error:
        log.warning("engine not warmed up", extra={"model": model, "reason": str(error)[:200]})


def _wasted(tokens: int) -> None:
    """Nobody has asked for them."""
