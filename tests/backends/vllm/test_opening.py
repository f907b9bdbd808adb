"""Loads that fail when the engine has begun to start, or is ready: nothing of it is left."""

import asyncio
import gc
from typing import Any

import psutil
import pytest

from backends.vllm.backend import VllmBackend
from gateway.backend import ModelContext
from gateway.errors import InferenceError
from tests.backends.vllm.conftest import (
    Llama,
    Write,
    engine_marks,
    engine_processes,
    loaded_before,
    stops_kept,
    zmq_threads,
)
from tests.builders import death_of, soon

pytestmark = engine_marks

THREADS_OF_A_CLIENT = 2
"""ZeroMQ's, in this process."""
TOOLS = {"tool_call_parser": "hermes"}


class Defect(Exception):
    """A mistake of the code behind a start."""


def fail(*_: object) -> Any:
    raise Defect


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
    llama: Llama, write: Write, monkeypatch: pytest.MonkeyPatch, patched: str
) -> None:
    monkeypatch.setattr(f"backends.vllm.metrics.EngineMetrics.{patched}", fail)
    with stops_kept() as stopped, pytest.raises(Defect):
        await loaded_before(llama, write(parameters=TOOLS))
    assert stopped == [llama.llm]


async def test_nothing_is_left_of_an_engine_whose_instance_cannot_be_made(
    ended_embedder: Llama, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    threads = zmq_threads()
    died = asyncio.create_task(death_of(ended_embedder.instance))
    monkeypatch.setattr("backends.vllm.metrics.EngineMetrics.begin", fail)
    with pytest.raises(Defect):
        await loaded_before(ended_embedder, write("embedder", runner="pooling", convert="embed"))
    assert await soon(died)
    ended_embedder.closed = True
    _, alive = await asyncio.to_thread(psutil.wait_procs, ended_embedder.processes, timeout=5)
    assert alive == []
    assert threads - zmq_threads() >= THREADS_OF_A_CLIENT


async def test_an_engine_that_does_not_start_leaves_no_threads(write: Write) -> None:
    context = write(kv_cache_memory_bytes=1)
    assert "its engine did not start" in await leaves_nothing(context, InferenceError)
