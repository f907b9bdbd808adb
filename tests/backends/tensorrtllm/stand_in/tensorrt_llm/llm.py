"""The engine: every word of the prompt is a token, and is returned."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from tensorrt_llm.executor import LoRARequest, RequestError
from tensorrt_llm.results import Piece, RequestOutput
from tensorrt_llm.sampling_params import SamplingParams

FURTHER = {
    *("backend", "max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width"),
    *("kv_cache_config", "scheduler_config", "guided_decoding_backend", "enable_lora"),
    *("lora_config", "enable_iter_perf_stats", "return_perf_metrics", "load_format"),
}
MOST_RUNNING = 1
"""Requests that its records count as scheduled; the others are queued."""
RECORD = {
    "iter": 7,
    "timestamp": "11-22-2026 03:04:05.000678",
    "numActiveRequests": 2,
    "maxNumActiveRequests": 64,
    "gpuMemUsage": 1024,
    "kvCacheStats": {
        "maxNumBlocks": 100,
        "freeNumBlocks": 75,
        "usedNumBlocks": 25,
        "tokensPerBlock": 32,
        "reusedBlocks": 5,
    },
    "inflightBatchingStats": None,
}


class Tokenizer:
    """Numbers stand for the words it has seen."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.number(word) for word in text.split(" ")]

    def number(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self._words[token] for token in tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> list[int]:
        assert add_generation_prompt
        assert tokenize
        assert not return_dict
        if conversation[-1]["role"] != "user":
            raise ValueError("the last message must be the user's")
        said = [f"<{m['role']}> {m['content']}" for m in conversation]
        tools = [f"<{each['function']['name']}>" for each in variables.get("tools") or ()]
        return self.encode(" ".join(tools + said))


class LLM:
    def __init__(  # noqa: PLR0913 - as published
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        if unknown := kwargs.keys() - FURTHER:
            raise ValueError(f"'{min(unknown)}': Extra inputs are not permitted")
        self.tokenizer = None if skip_tokenizer_init else Tokenizer()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._log(opened={"model": model, **kwargs, "pid": os.getpid()})

    def next_id(self) -> int:
        return next(self._numbers)

    def generate_async(  # noqa: PLR0913 - as published
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        if self._stopped:
            raise RuntimeError("LLM is shutting down")
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(sampling_params)}")
        text, tokens = self._read(inputs)
        words = text.split(" ")
        if "!surprise" in words:
            raise KeyError("/srv/models/secret")
        if "!dead" in words:
            raise RuntimeError("Executor worker returned error")
        if len(words) > 1000:
            raise ValueError(f"the prompt has {len(words)} tokens, more than max_num_tokens (1000)")
        sampling_params.set_up()
        result = RequestOutput(self, text, tokens, streaming)
        self._log(
            asked=text,
            streaming=streaming,
            tokenised_in_loop=isinstance(inputs, str),
            lora=None if lora_request is None else asdict(lora_request),
            sampling={k: v for k, v in asdict(sampling_params).items() if v is not None},
        )
        self._start(self._serve(result, words, sampling_params))
        return result

    async def get_stats_async(
        self,
        timeout: float | None = 2,  # noqa: ASYNC109 - as published
    ) -> AsyncIterator[dict[str, Any]]:
        yield RECORD
        running = min(len(self._tasks), MOST_RUNNING)
        yield {
            "numQueuedRequests": len(self._tasks) - running,
            "inflightBatchingStats": {"numScheduledRequests": running},
        }

    def shutdown(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._log(shutdown=os.getpid())

    def _read(self, inputs: Any) -> tuple[str, list[int]]:
        if isinstance(inputs, str):
            return inputs, self.tokenizer.encode(inputs)
        if isinstance(inputs, dict) and inputs.keys() == {"prompt_token_ids"}:
            return self.tokenizer.decode(inputs["prompt_token_ids"]), inputs["prompt_token_ids"]
        raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")

    async def _serve(self, result: RequestOutput, words: list[str], params: Any) -> None:
        if "!refuse" in words:
            result.outputs = []
            result.fail(RequestError("the prompt is longer than /srv/models/max_seq_len allows"))
        elif "!die" in words:
            result.fail(RuntimeError("Executor worker died"))
        else:
            slow = "!slow" in words
            said = itertools.cycle(words) if slow else words
            said = itertools.islice(said, 500)
            made = [self._piece(f" {word}" if n else word) for n, word in enumerate(said)]
            await result.follow(made, params, 0.02 if slow else 0.0)
            self._log(ended=result.prompt, aborted=result.aborted())

    def _piece(self, text: str) -> Piece:
        number = (self.tokenizer or Tokenizer()).number
        return Piece(text, number(text), number("<other>"))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _log(self, **event: Any) -> None:
        if path := os.environ.get("STAND_IN_LOG"):
            with open(path, "a") as log:
                log.write(json.dumps(event) + "\n")
