"""The configuration picks the scheduler."""

import threading
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.models import loading
from gateway.models.model import build_scheduler, import_scheduler
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.dynamic import DynamicScheduler
from gateway.schedulers.scheduler import DirectScheduler
from tests.builders import TEXT
from tests.gateway.schedulers.queues import dynamic
from tests.registries import Start, write


def test_requests_are_batched_only_if_configured() -> None:
    assert isinstance(build_scheduler(TEXT, ModelStatistics()), DirectScheduler)
    assert isinstance(build_scheduler(dynamic(), ModelStatistics()), DynamicScheduler)


async def test_a_load_imports_the_scheduler_in_a_thread(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[tuple[bool, threading.Thread]] = []

    def recorded(config: ModelConfig) -> object:
        imported.append((config.dynamic_batching is not None, threading.current_thread()))
        return import_scheduler(config)

    monkeypatch.setattr(loading, "import_scheduler", recorded)
    write(tmp_path, "a", 1, more="max_batch_size: 4 dynamic_batching {}")
    control = await start()
    assert [type(each.scheduler) for each in control.registry.models()] == [DynamicScheduler]
    [(batched, thread)] = imported
    assert batched
    assert thread is not threading.main_thread()
