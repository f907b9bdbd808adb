"""Backend `chatting`: a chat model without an engine, for servers that tests drive from outside.

A server finds it as it finds `scripted`. The last message says what it answers: `count N` counts,
one number per response, each after `delay_us` of the config; `fail` says a word and then fails;
all else is answered with the number of messages, and all that they say.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.tensor import text_tensor

CHATTING = """backend: "chatting"
input [
  { name: "messages" data_type: TYPE_STRING dims: [1] },
  { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true }
]
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""
"""A model's config, less what a test adds."""

US_PER_SECOND = 1_000_000


class ChattingInstance(Instance):
    """Answers each request on its own."""

    concurrency = None

    def __init__(self, delay_secs: float) -> None:
        self._delay_secs = delay_secs

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        (request,) = requests
        messages = request.input("messages")
        assert messages is not None
        said = json.loads(messages.elements()[0])
        async for text in self._answer([each["content"] for each in said]):
            outputs = (text_tensor("text_output", [text]),)
            yield 0, InferResponse(outputs=outputs, usage=Usage(completion_tokens=1))

    async def close(self) -> None:
        """Nothing is held."""

    async def _answer(self, said: list[Any]) -> AsyncIterator[str]:
        words = said[-1].split()
        if words[:1] == ["count"]:
            for number in range(1, int(words[1]) + 1):
                yield f"{number} "
                await asyncio.sleep(self._delay_secs)
        elif words == ["fail"]:
            yield "well"
            raise InferenceError(Code.INTERNAL, "lost for words")
        else:
            yield f"{len(said)}: {'|'.join(said)}"


class ChattingBackend(Backend):
    """Reads `delay_us` from `parameters`."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return config

    async def load(self, context: ModelContext) -> Instance:
        return ChattingInstance(int(context.config.parameter("delay_us", "0")) / US_PER_SECOND)
