"""Processes and threads of the engines that this process has started."""

import asyncio
import gc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from backends.vllm.backend import VllmBackend
from gateway.backend import ModelContext


def engine_processes() -> list[psutil.Process]:
    """The processes of the engines that this process itself has started.

    Servers that other tests keep running have engines, too; those are their children, not ours.
    """
    engines = [each for each in psutil.Process().children() if each.name().startswith("VLLM")]
    return [
        process
        for engine in engines
        for process in (engine, *engine.children(recursive=True))
        if process.name().startswith("VLLM") and process.status() != psutil.STATUS_ZOMBIE
    ]


def clients() -> list[psutil.Process]:
    """The processes that are clients of an engine of this process."""
    found = psutil.Process().children()
    return [each for each in found if "backends.vllm.engine_clients" in _command(each)]


def _command(process: psutil.Process) -> Sequence[str]:
    """The command line of a process that runs."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return ()


def zmq_threads() -> int:
    """Threads of ZeroMQ in this process, which has them for each context that is not closed."""
    tasks = Path("/proc/self/task").glob("*/comm")
    return sum(each.read_text().startswith("ZMQbg") for each in tasks)


async def leaves_nothing(context: ModelContext, expected: type[Exception]) -> str:
    """The error of a load, whose frames refer to the engine for as long as it is held.

    No process of the engine or of its clients is left, and no thread of ZeroMQ.
    """
    gc.collect()
    others, threads = {*engine_processes(), *clients()}, zmq_threads()
    with pytest.raises(expected) as caught:
        await VllmBackend().load(context)
    mine = {*engine_processes(), *clients()} - others
    _, alive = await asyncio.to_thread(psutil.wait_procs, mine, timeout=5)
    left = zmq_threads() - threads
    for each in alive:
        each.kill()
    assert (alive, left) == ([], 0)
    return str(caught.value)
