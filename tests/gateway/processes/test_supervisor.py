"""Real frontend processes: restart after a hang, new log settings."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.observability.log import Log
from gateway.processes import supervisor
from gateway.processes.listeners import ProcessHttpListener, ProcessListeners
from gateway.settings import HttpSettings, LogSettings
from tests.builders import WAIT_SECS
from tests.children import frontends_of


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", hello)])


@asynccontextmanager
async def running(listeners: ProcessListeners) -> AsyncIterator[ProcessHttpListener]:
    """The processes of these listeners, with a port."""
    listener = listeners.http(APP, HttpSettings(address="127.0.0.1", port=0))
    task = asyncio.create_task(listeners.run())
    yield listener
    listener.stop(0)
    await asyncio.wait_for(task, WAIT_SECS)


@asynccontextmanager
async def serving(log: Log) -> AsyncIterator[ProcessHttpListener]:
    """One process with a port."""
    async with running(ProcessListeners(1, log)) as listener:
        yield listener


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECS):
        while not found():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


async def ask(listener: ProcessHttpListener) -> str:
    async with httpx.AsyncClient(timeout=WAIT_SECS) as client:
        return (await client.get(f"http://127.0.0.1:{listener.port}/")).text


async def test_a_process_that_hangs_is_killed_and_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_SECS", 1.0)
    async with serving(Log()) as listener:
        assert await ask(listener) == "hello"
        [hung] = frontends_of(os.getpid())
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: hung not in frontends_of(os.getpid()))
        monkeypatch.undo()  # on a busy machine the next process may take longer
        assert await ask(listener) == "hello"
        assert hung not in frontends_of(os.getpid())
    statuses = [vars(each)["status"] for each in caplog.records if "status" in vars(each)]
    assert "killed after 1 s without an answer" in statuses


async def test_files_in_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gateway").mkdir()
    for name in ("json.py", "uvloop.py", "gateway/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    async with serving(Log()) as listener:
        assert await ask(listener) == "hello"


async def test_a_process_that_answers_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_SECS", 1.0)
    async with serving(Log()) as listener:
        assert await ask(listener) == "hello"
        before = frontends_of(os.getpid())
        await asyncio.sleep(2.5)
        assert frontends_of(os.getpid()) == before


async def test_blocks_of_event_loops_are_counted_also_those_of_ended_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_SECS", 3.0)
    listeners = ProcessListeners(1, Log())
    async with running(listeners) as listener:
        assert await ask(listener) == "hello"
        [blocked] = frontends_of(os.getpid())
        os.kill(blocked, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        os.kill(blocked, signal.SIGCONT)
        await until(lambda: listeners.reading().loops.blocked_secs > 0.2)
        found = listeners.reading().loops
        os.kill(blocked, signal.SIGKILL)
        await until(lambda: listeners.reading().restarts == 1 and listeners.reading().up == 1)
        assert await ask(listener) == "hello"
        later = listeners.reading().loops
        assert all(after >= before for after, before in zip(later, found, strict=True))
        assert found.blocks


async def speak_no_http(listener: ProcessHttpListener) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
    await asyncio.wait_for(reader.read(), WAIT_SECS)
    writer.close()
    await writer.wait_closed()


async def test_processes_receive_new_log_settings(tmp_path: Path) -> None:
    """The frontend process logs a warning for a client that does not speak HTTP."""
    file = tmp_path / "log"
    log = Log(LogSettings(file=str(file), warning=False))
    async with serving(log) as listener:
        await speak_no_http(listener)
        log.change({"warning": True})
        await asyncio.sleep(0)
        await speak_no_http(listener)
        [pid] = frontends_of(os.getpid())
        await until(lambda: f" {pid} " in file.read_text())
        assert file.read_text().count("Invalid HTTP request") == 1
