"""Loads that fail when the engine has begun to start, or is ready: nothing of it is left."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.errors import InferenceError
from tests.backends.vllm.conftest import (
    Llama,
    Write,
    engine_marks,
    loaded_before,
    stops_kept,
)
from tests.backends.vllm.engine_forks import engines_fork
from tests.backends.vllm.processes import leaves_nothing, zmq_threads
from tests.builders import death_of, soon

pytestmark = engine_marks

THREADS_OF_A_CLIENT = 2
"""ZeroMQ's, in this process."""
TOOLS = {"tool_call_parser": "hermes"}


class Defect(Exception):
    """A mistake of the code behind a start."""


def fail(*_: object) -> Any:
    raise Defect


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


async def test_an_engine_that_does_not_start_names_its_last_error_and_leaves_nothing(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM compiles its sampler, here by a program that is no compiler."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch("cpp.cxx", ("true",)), engines_fork():
        error = await leaves_nothing(write(), InferenceError)
    assert error.startswith("model 'llama': its engine did not start: InductorError: ")
