"""Instances behind the `reshape` of their model's configuration."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from gateway.backend import Answer, ExportedMetric, Instance, Note
from gateway.batches.shapes import Reshapes
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse


def with_reshapes(instance: Instance, config: ModelConfig) -> Instance:
    """The instance behind its config's reshapes; itself if there are none."""
    reshapes = Reshapes(config)
    return ReshapedInstance(instance, reshapes) if reshapes else instance


class ReshapedInstance(Instance):
    """Passes requests in the model's shapes, and responses in the clients' shapes."""

    def __init__(self, instance: Instance, reshapes: Reshapes) -> None:
        self._instance = instance
        self._reshapes = reshapes
        self.concurrency = instance.concurrency
        self.death = instance.death
        self.adapters = instance.adapters
        self.max_model_len = instance.max_model_len

    @property
    def alive(self) -> bool:  # type: ignore[override]  # read-only here
        return self._instance.alive

    @property
    def metrics(self) -> Iterable[ExportedMetric]:
        return self._instance.metrics

    @property
    def waits_for(self) -> Iterable[str]:
        return self._instance.waits_for

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        inside = [self._reshapes.towards_model(request) for request in requests]
        async with aclosing(self._instance.execute(inside)) as answers:
            async for index, answer in answers:
                yield index, self._outside(answer)

    def kill(self, reason: str) -> None:
        self._instance.kill(reason)

    async def check_ready(self) -> None:
        await self._instance.check_ready()

    async def close(self) -> None:
        await self._instance.close()

    def _outside(
        self, answer: InferResponse | InferenceError | Note
    ) -> InferResponse | InferenceError | Note:
        if not isinstance(answer, InferResponse):
            return answer
        try:
            return self._reshapes.towards_client(answer)
        except InferenceError as error:
            return error
