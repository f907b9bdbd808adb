"""The execution of warm-up samples, and their statistics."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import ModelConfig, ModelWarmup, WarmupInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.models.warmup import warm_up
from gateway.observability.statistics import ModelStatistics
from tests.builders import FLAG, TEXT, ScriptedInstance, settle, soon, text_response
from tests.registries import ScriptedBackend, Start, write

INPUTS = {"text_input": WarmupInput(data_type=DataType.TYPE_STRING, dims=(1,), zero_data=True)}
BROKEN = InferenceError(Code.INTERNAL, "no way")


def config(*samples: tuple[str, int, int], batch: int = 4) -> ModelConfig:
    """A config with samples of these names, batch sizes and counts."""
    settings = tuple(
        ModelWarmup(name=name, batch_size=size, count=count, inputs=INPUTS)
        for name, size, count in samples
    )
    return replace(TEXT, max_batch_size=batch, model_warmup=settings)


class WarmUp:
    """A warm-up under way."""

    def __init__(self, config: ModelConfig) -> None:
        self.instance = ScriptedInstance(1)
        self.statistics = ModelStatistics()
        self.task = asyncio.create_task(
            warm_up(self.instance, "text_0", config, Path(), self.statistics)
        )

    async def failure(self) -> InferenceError:
        with pytest.raises(InferenceError) as caught:
            await soon(self.task)
        return caught.value


async def finish_next(warmup: WarmUp) -> int:
    """Answer all requests of the next execution; returns their number."""
    execution = await warmup.instance.begun()
    for index in range(len(execution.requests)):
        execution.answer(text_response("ok", final=True), index)
    execution.end()
    return len(execution.requests)


async def test_each_sample_is_executed_so_often_and_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "sluice.warmup")
    warmup = WarmUp(config(("s", 3, 2), ("t", 1, 0)))
    assert [await finish_next(warmup) for _ in range(3)] == [3, 3, 1]
    await soon(warmup.task)
    statistics = warmup.statistics
    assert (statistics.inference_count, statistics.execution_count) == (7, 3)
    assert (statistics.success.count, statistics.pending) == (7, 0)
    assert {size: each.compute_infer.count for size, each in statistics.batches.items()} == {
        3: 2,
        1: 1,
    }
    assert [record.getMessage() for record in caplog.records] == [
        "model 'text' instance text_0 is running warmup sample 's' for iteration 1",
        "model 'text' instance text_0 is running warmup sample 's' for iteration 2",
        "model 'text' instance text_0 is running warmup sample 't' for iteration 1",
    ]


async def test_without_samples_nothing_is_executed() -> None:
    warmup = WarmUp(TEXT)
    await soon(warmup.task)
    assert warmup.instance.executions == []


async def test_the_first_sample_that_fails_is_the_last() -> None:
    warmup = WarmUp(config(("s", 2, 5), ("t", 1, 0)))
    execution = await warmup.instance.begun()
    for index in range(2):
        execution.answer(BROKEN, index)
    execution.end()
    error = await warmup.failure()
    assert error.code is Code.INVALID_ARG
    assert error.message == "failed to run warmup sample 's': no way; no way; "
    assert len(warmup.instance.executions) == 1
    assert (warmup.statistics.fail.count, warmup.statistics.pending) == (2, 0)


async def test_an_exception_fails_all_requests_and_its_text_is_hidden() -> None:
    warmup = WarmUp(config(("s", 1, 0)))
    (await warmup.instance.begun()).crash(RuntimeError("secret"))
    error = await warmup.failure()
    assert error.message == (
        "failed to run warmup sample 's': model 'text' failed unexpectedly; the server's log says "
        "why; "
    )


async def test_a_sample_that_cannot_be_made_keeps_all_others_from_running() -> None:
    warmup = WarmUp(config(("s", 1, 0), ("t", 9, 0)))
    assert "batch size 9 for 'text'" in (await warmup.failure()).message
    assert warmup.instance.executions == []


async def test_a_decoupled_model_is_warm_after_its_final_flags() -> None:
    warmup = WarmUp(config(("s", 2, 0)))
    execution = await warmup.instance.begun()
    for number in range(200):  # more than a stream holds for a reader that is away
        execution.answer(text_response("more"), number % 2)
    execution.answer(FLAG, 1)
    await settle()
    assert not warmup.task.done()
    execution.answer(FLAG, 0)
    execution.end()
    await soon(warmup.task)
    assert execution.taken == 202


async def test_a_load_that_is_cancelled_stops_the_execution() -> None:
    warmup = WarmUp(config(("s", 2, 0)))
    execution = await warmup.instance.begun()
    warmup.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(warmup.task)
    assert execution.stopped.is_set()
    assert warmup.statistics.pending == 0


WARMUP = """
model_warmup {
  name: "s" batch_size: 1
  inputs { key: "text_input" value { data_type: TYPE_STRING dims: 1 zero_data: true } }
}
"""


async def test_a_model_is_ready_only_once_every_instance_is_warm(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=WARMUP + "instance_group { kind: KIND_CPU count: 2 }")
    control = await start(settled=False)
    for _ in range(2):
        await soon(backend.loading.get())
    await settle()
    instances = backend.instances["a 1"]
    for instance in instances:
        execution = await instance.begun()
        assert not control.registry.settled
        execution.finish("warm")
    await soon(control.registry.wait_settled())
    model = control.registry.find("a", "")
    assert model.ready
    assert len(model.requests) == 0
    assert model.statistics.success.count == 2


async def test_a_failed_warm_up_fails_the_load_with_its_reason(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=WARMUP)
    control = await start(settled=False)
    await soon(backend.loading.get())
    await settle()
    (instance,) = backend.instances["a 1"]
    execution = await instance.begun()
    execution.answer(BROKEN)
    execution.end()
    await soon(control.registry.wait_settled())
    reason = "Invalid argument: failed to run warmup sample 's': no way; "
    assert control.registry.failures() == {"a version 1": reason}
    assert instance.closes == 1
