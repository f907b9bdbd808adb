"""The processes of a real engine, after the gateway that has started it was killed."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.backends.vllm.conftest import Write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

GONE_SECS = 30.0

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
    await instance.death

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.release
def test_nothing_is_left_of_an_engine_that_was_serving(write: Write, tmp_path: Path) -> None:
    """The engine has two clients, and what it started may start processes when it is killed."""
    context = write(api_server_count=2)
    script = tmp_path / "starter.py"
    script.write_text(GATEWAY)
    with psutil.Popen(
        [sys.executable, str(script), str(context.path), str(context.store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as gateway:
        try:
            assert any("ready" in line for line in gateway.stdout)
            kill_and_expect_nothing_left(gateway)
        finally:
            gateway.kill()


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
