"""One instance of a TensorRT-LLM model: an engine in a worker."""

import asyncio
import logging
from collections.abc import AsyncGenerator, MutableSet, Sequence
from contextlib import aclosing
from dataclasses import replace

from backends.python.llm_instance import LlmInstance
from gateway.backend import Answer, Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest

log = logging.getLogger("sluice.tensorrtllm")

STOP_SECS = 5.0
"""Longest delivery of a stop to the other instances of a model."""


class TensorRtLlmInstance(LlmInstance):
    """Delivers stops to all instances of its model.

    `adapters` are the names of LoRA adapters for OpenAI's clients. `siblings` are all instances of
    the same model and version.
    """

    def __init__(
        self,
        worker: Instance,
        adapters: Sequence[str],
        siblings: "MutableSet[TensorRtLlmInstance]",
    ) -> None:
        super().__init__(worker)
        self.adapters = adapters
        self._siblings = siblings
        siblings.add(self)

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        if stops := [each for each in requests if _stops_another(each)]:
            await self._stop_elsewhere(stops)
        async with aclosing(super().execute(requests)) as answers:
            async for answer in answers:
                yield answer

    async def deliver_stops(self, requests: Sequence[InferRequest]) -> None:
        """Deliver requests that stop others; another instance answers them."""
        try:
            async with aclosing(self._inner.execute(requests)) as answers:
                async for _ in answers:
                    """Each is a cancellation or a refusal of the stop itself."""
        except InferenceError as error:
            # An instance that has failed has no request to stop.
            log.info("stop not delivered to an instance", extra={"reason": error.message})

    async def _stop_elsewhere(self, requests: Sequence[InferRequest]) -> None:
        """Deliver stops to the other instances: only the instances know their requests."""
        others = [each for each in self._siblings if each is not self]
        # Only the instance that answers a request subscribes to its cancellation.
        requests = [replace(each, cancellation=None) for each in requests]
        try:
            async with asyncio.timeout(STOP_SECS), asyncio.TaskGroup() as tasks:
                for each in others:
                    tasks.create_task(each.deliver_stops(requests))
        except TimeoutError:
            log.warning("stop not delivered in time", extra={"model": requests[0].model})

    async def close(self) -> None:
        self._siblings.discard(self)
        await super().close()


def _stops_another(request: InferRequest) -> bool:
    stop = request.input("stop")
    return stop is not None and bool(stop.array().any())
