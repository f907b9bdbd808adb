"""The processes of a real engine, after the gateway that has started it was killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.backends.vllm.conftest import Write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

GONE_SECS = 30.0
SPAWNED = "multiprocessing.spawn"
"""What is on the command line of a process that multiprocessing has started afresh."""

GATEWAY = """
import asyncio, sys
from pathlib import Path
from backends.vllm.backend import VllmBackend
from gateway.backend import ModelContext
from gateway.config import ModelConfig

async def main():
    folder, store = map(Path, sys.argv[1:])
    backend = VllmBackend()
    config = backend.complete(ModelConfig(name="llama", backend="vllm"), folder)
    context = ModelContext(
        config=config, path=folder, store=store, infer=print, wasted=lambda tokens: None
    )
    instance = await backend.load(context)
    print("ready", flush=True)
    await instance.died()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def gateway(write: Write, tmp_path: Path) -> Iterator[psutil.Popen]:
    """A process that starts an engine with two clients, and says when it is ready."""
    context = write(api_server_count=2)
    script = tmp_path / "starter.py"
    script.write_text(GATEWAY)
    with psutil.Popen(
        [sys.executable, str(script), str(context.path), str(context.store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        yield process
        process.kill()


def kill_and_expect_nothing_left(gateway: psutil.Popen) -> None:
    """Kill the gateway; what it has started, and what that starts on, must end by itself."""
    left = gateway.children(recursive=True)
    assert left
    gateway.kill()
    for process in left:
        left += [new for new in children(process) if new not in left]
    _, alive = psutil.wait_procs(left, timeout=GONE_SECS)
    for process in alive:
        process.kill()
    assert alive == []


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def has_begun(gateway: psutil.Popen) -> bool:
    """Whether it has started a process of an engine; it runs short commands before that."""
    return any(SPAWNED in word for child in children(gateway) for word in command_line(child))


def command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_nothing_is_left_of_an_engine_that_was_serving(gateway: psutil.Popen) -> None:
    assert any("ready" in line for line in gateway.stdout)
    kill_and_expect_nothing_left(gateway)


def test_nothing_is_left_of_an_engine_that_was_starting(gateway: psutil.Popen) -> None:
    while not has_begun(gateway):
        assert gateway.poll() is None
    kill_and_expect_nothing_left(gateway)
