"""Instances behind the `reshape` of their model's configuration."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.backend import Answer, ForwardingInstance, Instance, Note
from gateway.batches.shapes import Reshapes
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse


def with_reshapes(instance: Instance, config: ModelConfig) -> Instance:
    """The instance behind its config's reshapes; itself if there are none."""
    reshapes = Reshapes(config)
    return ReshapedInstance(instance, reshapes) if reshapes else instance


class ReshapedInstance(ForwardingInstance):
    """Passes requests in the model's shapes, and responses in the clients' shapes."""

    def __init__(self, instance: Instance, reshapes: Reshapes) -> None:
        super().__init__(instance)
        self._reshapes = reshapes

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        inside = [replace(self._reshapes.towards_model(request), sink=None) for request in requests]
        async with aclosing(self._inner.execute(inside)) as answers:
            async for index, answer in answers:
                yield index, self._outside(answer)

    def _outside(
        self, answer: InferResponse | InferenceError | Note
    ) -> InferResponse | InferenceError | Note:
        if not isinstance(answer, InferResponse):
            return answer
        try:
            return self._reshapes.towards_client(answer)
        except InferenceError as error:
            return error
