"""One instance of a TensorRT-LLM model: an engine in a worker."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, MutableSet, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.backend import Answer, ExportedMetric, Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse, Usage

log = logging.getLogger("sluice.tensorrtllm")

STOP_SECS = 5.0
"""Longest delivery of a stop to the other instances of a model."""
USAGE = "sluice_usage"
"""The response parameter with prompt tokens, new tokens and the finish reason."""


class TensorRtLlmInstance(Instance):
    """Sends every request to the worker at once, and reads token counts from its responses.

    `adapters` are the names of LoRA adapters for OpenAI's clients. `siblings` are all instances of
    the same model and version.
    """

    concurrency = None

    def __init__(
        self,
        worker: Instance,
        adapters: Sequence[str],
        siblings: "MutableSet[TensorRtLlmInstance]",
    ) -> None:
        self._worker = worker
        self.adapters = adapters
        self.death = worker.death
        self._siblings = siblings
        siblings.add(self)

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return self._worker.alive

    @property
    def metrics(self) -> Iterable[ExportedMetric]:
        return self._worker.metrics

    @property
    def waits_for(self) -> Iterable[str]:
        return self._worker.waits_for

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        if stops := [each for each in requests if _stops_another(each)]:
            await self._stop_elsewhere(stops)
        async with aclosing(self._worker.execute(requests)) as answers:
            async for index, answer in answers:
                yield index, _with_usage(answer) if isinstance(answer, InferResponse) else answer

    async def deliver_stops(self, requests: Sequence[InferRequest]) -> None:
        """Deliver requests that stop others; another instance answers them."""
        try:
            async with aclosing(self._worker.execute(requests)) as answers:
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

    def kill(self, reason: str) -> None:
        self._worker.kill(reason)

    async def check_ready(self) -> None:
        await self._worker.check_ready()

    async def close(self) -> None:
        self._siblings.discard(self)
        await self._worker.close()


def _stops_another(request: InferRequest) -> bool:
    stop = request.input("stop")
    return stop is not None and bool(stop.array().any())


def _with_usage(response: InferResponse) -> InferResponse:
    """The response with its usage, and without the internal parameter."""
    usage = response.parameters.get(USAGE)
    if usage is None:
        return response
    prompt, new, reason = str(usage).split(",")
    return replace(
        response,
        parameters={k: v for k, v in response.parameters.items() if k != USAGE},
        usage=Usage(prompt_tokens=int(prompt), completion_tokens=int(new), finish_reason=reason),
    )
