"""Backend `caching_llm`: a stand-in for an LLM with a prefix cache, which computes by sleeping.

A token is four bytes of a prompt. The only response of a request is JSON with the tokens of the
prompt, and those of them that were in the cache.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from hashlib import blake2b
from pathlib import Path

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.tensor import text_tensor

NAME = "caching_llm"
CONFIG = f"""
backend: "{NAME}"
input {{ name: "text_input" data_type: TYPE_STRING dims: 1 }}
output {{ name: "text_output" data_type: TYPE_STRING dims: 1 }}
"""
TOKEN_BYTES = 4
BLOCK_BYTES = 16 * TOKEN_BYTES
CACHE_TOKENS = "500000"
TOKENS_PER_SEC = "200000"
"""Defaults of the model's parameters `cache_tokens` and `tokens_per_sec`."""


class CachedBlocks:
    """The blocks of prompts in the cache, the latest used last; a key is of all bytes up to it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, prompt: bytes) -> int:
        """Hold all blocks of a prompt; the bytes of its beginning that were held before."""
        key, keys = blake2b(digest_size=16), []
        for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
            key.update(prompt[end - BLOCK_BYTES : end])
            keys.append(key.digest())
        held = next((n for n, each in enumerate(keys) if each not in self._blocks), len(keys))
        for each in reversed(keys):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return held * BLOCK_BYTES


class CachingLlm(Instance):
    """Computes one prompt after the other. `prompt_tokens` and `cached_tokens` are of all."""

    concurrency = None

    def __init__(self, cache_tokens: int, tokens_per_sec: float) -> None:
        self.prompt_tokens = self.cached_tokens = 0
        self._cache = CachedBlocks(cache_tokens * TOKEN_BYTES // BLOCK_BYTES)
        self._tokens_per_sec = tokens_per_sec
        self._computing = asyncio.Lock()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            prompt = b"".join(b"".join(each.elements()) for each in request.inputs)
            tokens = max(1, len(prompt) // TOKEN_BYTES)
            async with self._computing:
                cached = self._cache.use(prompt) // TOKEN_BYTES
                await asyncio.sleep((tokens - cached) / self._tokens_per_sec)
            self.prompt_tokens += tokens
            self.cached_tokens += cached
            text = json.dumps({"prompt": tokens, "cached": cached})
            usage = Usage(tokens, 1, "stop", cached)
            outputs = (text_tensor("text_output", [text]),)
            yield index, InferResponse(outputs=outputs, usage=usage, final=True)

    async def close(self) -> None:
        """It has nothing to release."""


class CachingLlmBackend(Backend):
    """Reads `cache_tokens` and `tokens_per_sec` from `parameters`."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return config

    async def load(self, context: ModelContext) -> Instance:
        read = context.config.parameter
        rate = float(read("tokens_per_sec", TOKENS_PER_SEC))
        return CachingLlm(int(read("cache_tokens", CACHE_TOKENS)), rate)


def install(folder: Path) -> Path:
    """Install the backend into a folder; a process that imports from there finds it."""
    metadata = folder / f"{NAME}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    point = f"[sluice.backends]\n{NAME} = {__name__}:{CachingLlmBackend.__name__}\n"
    (metadata / "entry_points.txt").write_text(point)
    return folder
