"""Backend `stand_in`: an engine without weights, whose instances end when a sweep says so."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.tensor import Tensor, text_tensor


class StandIn(Instance):
    """Answers each request with its text, `responses` times; between two answers the loop turns.

    For `messages` the text is that of the last message. `die` ends it, as the loss of an engine's
    process does. It has a pipe until it is closed, as an engine has connections.
    """

    def __init__(self, responses: int, concurrency: int | None) -> None:
        self.concurrency = concurrency
        self._responses = responses
        self._pipe = os.pipe()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.death = self._death

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            for number in range(1, self._responses + 1):
                await asyncio.sleep(0)
                output = _answer(request)
                usage = Usage(completion_tokens=1)
                final = number == self._responses
                yield index, InferResponse(outputs=(output,), usage=usage, final=final)

    def die(self) -> None:
        """Execute no more."""
        if not self._death.done():
            self._death.set_result("its engine has stopped")

    async def close(self) -> None:
        for end in self._pipe:
            os.close(end)


class StandInBackend(Backend):
    """Reads `responses` and `concurrency` (0: no limit) from `parameters`."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return config

    async def load(self, context: ModelContext) -> Instance:
        read = context.config.parameter
        return StandIn(int(read("responses", "1")), int(read("concurrency", "0")) or None)


def install(folder: Path) -> Path:
    """Install the backend into a folder; a process that imports from there finds it."""
    metadata = folder / "stand_in-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
    points = "[sluice.backends]\nstand_in = tests.sweep.stand_in:StandInBackend\n"
    (metadata / "entry_points.txt").write_text(points)
    return folder


def _answer(request: InferRequest) -> Tensor:
    messages = request.input("messages")
    if messages is not None:
        return text_tensor("text_output", [json.loads(messages.elements()[0])[-1]["content"]])
    tensor = request.input("text_input")
    assert tensor is not None
    return replace(tensor, name="text_output")
