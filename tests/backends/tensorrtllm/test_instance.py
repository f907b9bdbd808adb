"""Several engines of one model, as schedulers see them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from backends.tensorrtllm import instance as instances
from backends.tensorrtllm.instance import TensorRtLlmInstance
from gateway.backend import Answer, Instance
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.tensor import Datatype, Tensor
from tests.backends.python.loading import soon


class Worker(Instance):
    """Refuses all that it is asked, and keeps it; or fails or hangs altogether."""

    def __init__(self, *, broken: bool = False, hangs: bool = False) -> None:
        self.asked: list[str] = []
        self._broken, self._hangs = broken, hangs

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        self.asked += [each.id for each in requests]
        if self._broken:
            raise InferenceError(Code.UNAVAILABLE, "it is not healthy")
        if self._hangs:
            await asyncio.Event().wait()
        for index, _ in enumerate(requests):
            yield index, InferenceError(Code.CANCELLED, "Request cancelled by client")

    async def close(self) -> None:
        """Nothing is to be released."""


def request(name: str, *, stop: bool) -> InferRequest:
    tensor = Tensor("stop", Datatype.BOOL, (1,), bytes([stop]))
    return InferRequest(model="m", id=name, inputs=(tensor,))


async def executed(instance: Instance, *requests: InferRequest) -> list[Answer]:
    return [answer async for answer in instance.execute(requests)]


async def test_a_stop_reaches_every_engine_and_is_answered_once() -> None:
    workers = [Worker(), Worker(), Worker(broken=True), Worker()]
    siblings: set[TensorRtLlmInstance] = set()
    made = [TensorRtLlmInstance(worker, (), siblings) for worker in workers]
    await made[3].close()
    answers = await soon(executed(made[0], request("r1", stop=True)))
    assert [index for index, _ in answers] == [0]
    await soon(executed(made[1], request("r2", stop=False)))
    assert [each.asked for each in workers] == [["r1"], ["r1", "r2"], ["r1"], []]


async def test_an_engine_that_hangs_does_not_keep_others_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instances, "STOP_SECS", 0.05)
    own, siblings = Worker(), set[TensorRtLlmInstance]()
    first = TensorRtLlmInstance(own, (), siblings)
    second = TensorRtLlmInstance(Worker(hangs=True), (), siblings)
    await soon(executed(first, request("r1", stop=True)))
    assert own.asked == ["r1"]
    await second.close()
