"""Loads that fail when the engine has begun to start, or is ready: nothing of it is left."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.vllm.backend import VllmBackend
from gateway.backend import ModelContext
from gateway.errors import InferenceError
from tests.backends.vllm.conftest import Write, engine_processes

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

TOOLS = {"tool_call_parser": "hermes"}


class Defect(Exception):
    """A mistake of the code behind a start."""


def fail(*_: object) -> Any:
    raise Defect


def zmq_threads() -> int:
    """Threads of ZeroMQ in this process, which has them for each context that is not closed."""
    tasks = Path("/proc/self/task").glob("*/comm")
    return sum(each.read_text().startswith("ZMQbg") for each in tasks)


async def leaves_nothing(context: ModelContext, expected: type[Exception]) -> str:
    """The error of a load, whose frames refer to the engine for as long as it is held."""
    gc.collect()
    others, threads = set(engine_processes()), zmq_threads()
    with pytest.raises(expected) as caught:
        await VllmBackend().load(context)
    mine = set(engine_processes()) - others
    _, alive = await asyncio.to_thread(psutil.wait_procs, mine, timeout=5)
    left = zmq_threads() - threads
    for each in alive:
        each.kill()
    assert (alive, left) == ([], 0)
    return str(caught.value)


@pytest.mark.parametrize("patched", ["count_tool_calls", "begin"])
async def test_an_engine_whose_instance_cannot_be_made_is_stopped(
    write: Write, monkeypatch: pytest.MonkeyPatch, patched: str
) -> None:
    monkeypatch.setattr(f"backends.vllm.metrics.EngineMetrics.{patched}", fail)
    await leaves_nothing(write(parameters=TOOLS), Defect)


async def test_an_engine_with_clients_whose_instance_cannot_be_made_is_stopped(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.vllm.engine_clients.opening.SharedMetrics", fail)
    await leaves_nothing(write(api_server_count=2), Defect)


async def test_an_engine_that_does_not_start_leaves_no_threads(write: Write) -> None:
    context = write(kv_cache_memory_bytes=1)
    assert "its engine did not start" in await leaves_nothing(context, InferenceError)
