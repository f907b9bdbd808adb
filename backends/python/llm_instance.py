"""One instance of an LLM in a worker: token counts of its responses become usage."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.backend import Answer, ExportedMetric, Instance
from gateway.messages import InferRequest, InferResponse, Usage

USAGE = "sluice_usage"
"""The response parameter with prompt tokens, new tokens and the finish reason."""


class LlmInstance(Instance):
    """Sends every request to the worker at once, and reads token counts from its responses."""

    concurrency = None

    def __init__(self, worker: Instance) -> None:
        self._worker = worker
        self.death = worker.death

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
        async with aclosing(self._worker.execute(requests)) as answers:
            async for index, answer in answers:
                yield index, _with_usage(answer) if isinstance(answer, InferResponse) else answer

    def kill(self, reason: str) -> None:
        self._worker.kill(reason)

    async def check_ready(self) -> None:
        await self._worker.check_ready()

    async def close(self) -> None:
        await self._worker.close()


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
