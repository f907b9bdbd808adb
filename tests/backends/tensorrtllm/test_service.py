"""Answers to one request, without a worker process."""

import asyncio
import importlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.backends.python.worker.gateway import WORKER
from tests.builders import settle
from tests.serving import ROOT


class Result:
    """Three tokens, and how many of them have been taken."""

    taken = 0

    def __aiter__(self) -> "Result":
        return self

    async def __anext__(self) -> Any:
        if self.taken == 3:
            raise StopAsyncIteration
        self.taken += 1
        one = SimpleNamespace(
            index=0,
            text="abc"[: self.taken],
            token_ids=[1, 2, 3][: self.taken],
            finish_reason="stop" if self.taken == 3 else None,
            stop_reason=None,
            cumulative_logprob=None,
            logprobs=None,
            request_perf_metrics=None,
        )
        return SimpleNamespace(outputs=[one], finished=self.taken == 3, prompt_token_ids=[1])

    def abort(self) -> None:
        """Nothing more is to be made."""


class Sender:
    """Has room once the test says so."""

    def __init__(self) -> None:
        self.freed = asyncio.Event()
        self.sent: list[int] = []

    def send(self, response: Any, flags: int) -> None:
        self.sent.append(flags)

    async def room(self) -> None:
        await self.freed.wait()

    def is_cancelled(self) -> bool:
        return False


def asked(sender: Sender, **inputs: Any) -> Any:
    tensors = [
        SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: np.array([value]))
        for name, value in inputs.items()
    ]
    return SimpleNamespace(
        inputs=lambda: tensors,
        parameters=lambda: json.dumps({}),
        request_id=lambda: "",
        get_response_sender=lambda: sender,
    )


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Result]:
    """The service, and what its engine answers with."""
    for folder in (WORKER, ROOT / "backends" / "tensorrtllm" / "worker"):
        monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("sluice_tensorrtllm.service")
    live = importlib.import_module("sluice_tensorrtllm.service")
    result = Result()
    llm = SimpleNamespace(generate_async=lambda *_, **__: result)
    library = SimpleNamespace(SamplingParams=dict, RequestError=ZeroDivisionError)
    contract = module.ModelContract(model="m", decoupled=True, batched=False, max_length=None)
    adapters = SimpleNamespace(take=lambda *_: None, names=[])
    metrics = SimpleNamespace(finished=lambda *_: None)
    return module.RequestService(
        llm, library, contract, adapters, live.AbortWatch(1.0), metrics
    ), result


async def test_a_reader_that_lags_has_no_more_taken_for_it(service: tuple[Any, Result]) -> None:
    serving, result = service
    sender = Sender()
    async with asyncio.timeout(20):
        answering = asyncio.create_task(serving.answer(asked(sender, text_input=b"p", stream=True)))
        await settle()
        assert (result.taken, sender.sent) == (1, [0])
        sender.freed.set()
        await answering
    assert (result.taken, sender.sent) == (3, [0, 0, 1])
