"""Loads that fail when an engine with clients is ready."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.processes.channel import NO_CALL, Channel
from tests.backends.vllm.conftest import Write
from tests.backends.vllm.engine_clients.test_shared_engine_client import Process
from tests.builders import soon

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


class Defect(Exception):
    """A mistake of the code behind a start."""


class Engine:
    """Stands for a running engine with one client."""

    def __init__(self, folder: Path) -> None:
        self.process = Process()
        self.clients, self.processes = [self.process], ()
        self.metrics_folder = folder
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


async def be_ready(process: Process) -> Channel:
    """The other end of the connection: a client that offers what an engine has."""
    from backends.vllm.engine_clients.messages import ClientKind, Offer, write

    channel = Channel(lambda _: None)
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=process.theirs)
    channel.send(ClientKind.READY, NO_CALL, write(Offer((), 512, 64)))
    return channel


async def test_an_engine_with_clients_whose_instance_cannot_be_made_is_stopped(
    backend: Any, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> Any:
        raise Defect

    engine = Engine(tmp_path)
    module = "backends.vllm.engine_clients.instance"
    monkeypatch.setattr(f"{module}.SharedEngine", lambda *_: engine)
    monkeypatch.setattr(f"{module}.SharedMetrics", fail)
    loading = asyncio.create_task(backend.load(write(api_server_count=2)))
    client = await be_ready(engine.process)
    with pytest.raises(Defect):
        await soon(loading)
    assert engine.stops == 1
    client.close()
    await soon(client.lost())
