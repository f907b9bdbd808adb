"""One instance of an estimator: requests that name no output get one."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.backend import Answer, ForwardingInstance, Instance
from gateway.config import ModelConfig
from gateway.messages import InferRequest, RequestedOutput

FIRST = ("predict", "transform")
"""The output that is computed if a request names none; else the first one of the config."""


class SklearnInstance(ForwardingInstance):
    """Requests `predict` for requests without outputs: the others are computed on request only."""

    def __init__(self, worker: Instance, config: ModelConfig) -> None:
        super().__init__(worker)
        names = [each.name for each in config.output]
        name = next((each for each in (*FIRST, *names) if each in names), "")
        self._usual = (RequestedOutput(name),) if name else ()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        asked = [each if each.outputs else replace(each, outputs=self._usual) for each in requests]
        async with aclosing(self._inner.execute(asked)) as answers:
            async for answer in answers:
                yield answer
