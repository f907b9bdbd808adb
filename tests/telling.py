"""Backend `telling`: an LLM without an engine, whose every token follows from the text before it.

A server finds it as it finds `scripted`. A token is a space and a number; the last one is the
`max_tokens`-th. A part of a text that is missing, doubled or changed changes all that follow. Names
in `multi_lora.json` are adapters: each has texts of its own.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import orjson

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.tensor import text_tensor

TELLING = """backend: "telling"
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [1] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true },
  { name: "openai_request" data_type: TYPE_STRING dims: [1] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [-1] },
  { name: "openai_response" data_type: TYPE_STRING dims: [1] }
]
"""
"""A model's config, less its parameters: `delay_us` before each token, and those of a test."""

ADAPTERS_FILE = "multi_lora.json"
US_PER_SECOND = 1_000_000


def told(text: str, tokens: int) -> str:
    """The text that follows a text."""
    whole = text
    for _ in range(tokens):
        whole += f" {crc32(whole.encode()) % 1000}"
    return whole.removeprefix(text)


def conversation(body: dict[str, Any]) -> str:
    """The text of a conversation, as a chat template makes it."""
    text = "".join(f"<{each['role']}>{each['content']}" for each in body["messages"])
    return text if body.get("continue_final_message") else f"{text}<assistant>"


def adapted(text: str, adapter: str) -> str:
    """The text that a model with an adapter continues."""
    return f"<{adapter}>{text}" if adapter else text


class TellingInstance(Instance):
    """Tells each request its own text."""

    concurrency = None

    def __init__(self, delay_secs: float, adapters: Sequence[str] = ()) -> None:
        self.adapters = adapters
        self._delay_secs = delay_secs
        self._numbers = count()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        (request,) = requests
        given = request.input("openai_request")
        responses = self._generate(request) if given is None else self._chat(given.elements()[0])
        async for each in responses:
            yield 0, each

    async def close(self) -> None:
        """Nothing is held."""

    async def _tell(self, text: str, tokens: int) -> AsyncIterator[tuple[str, bool]]:
        """Each token, and whether it is the last one."""
        for number in range(1, tokens + 1):
            await asyncio.sleep(self._delay_secs)
            token = told(text, 1)
            text += token
            yield token, number == tokens

    async def _generate(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        given, messages = request.input("text_input"), request.input("messages")
        if messages is not None:
            text = conversation({"messages": orjson.loads(messages.elements()[0])})
        else:
            assert given is not None
            text = given.elements()[0].decode()
        text = adapted(text, str(request.parameters.get("lora_name", "")))
        async for token, is_last in self._tell(text, request.parameters["max_tokens"]):
            output = text_tensor("text_output", [token])
            yield InferResponse(outputs=(output,), usage=Usage(1, 1), final=is_last)

    async def _chat(self, given: bytes) -> AsyncIterator[InferResponse]:
        body = orjson.loads(given)
        head = {"id": f"chat-{next(self._numbers)}", "created": time.time_ns()}
        yield _chunk(head, {"role": "assistant", "content": ""}, 0)
        adapter = body["model"] if body["model"] in self.adapters else ""
        text = adapted(conversation(body), adapter)
        async for token, is_last in self._tell(text, body["max_tokens"]):
            yield _chunk(head, {"content": token}, 1, "length" if is_last else None)


def _chunk(
    head: dict[str, Any], delta: dict[str, str], tokens: int, finish_reason: str | None = None
) -> InferResponse:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    output = text_tensor("openai_response", [orjson.dumps({**head, "choices": [choice]}).decode()])
    usage = Usage(completion_tokens=tokens)
    return InferResponse(outputs=(output,), usage=usage, final=finish_reason is not None)


class TellingBackend(Backend):
    """Reads `delay_us` from `parameters`, and names of adapters from a file."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return config

    async def load(self, context: ModelContext) -> Instance:
        file = context.path / ADAPTERS_FILE
        adapters = tuple(orjson.loads(file.read_bytes())) if file.exists() else ()
        delay_us = int(context.config.parameter("delay_us", "0"))
        return TellingInstance(delay_us / US_PER_SECOND, adapters)
