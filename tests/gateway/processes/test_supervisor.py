"""Real processes with the connections: one that hangs, and what they are told to log."""

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
async def serving(log: Log) -> AsyncIterator[ProcessHttpListener]:
    """One process with a port."""
    doors = ProcessListeners(1, log)
    door = doors.http(APP, HttpSettings(address="127.0.0.1", port=0))
    running = asyncio.create_task(doors.run())
    yield door
    door.stop(0)
    await asyncio.wait_for(running, WAIT_SECS)


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECS):
        while not found():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


async def ask(door: ProcessHttpListener) -> str:
    async with httpx.AsyncClient(timeout=WAIT_SECS) as client:
        return (await client.get(f"http://127.0.0.1:{door.port}/")).text


async def test_one_that_hangs_is_killed_and_another_is_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Log()) as door:
        assert await ask(door) == "hello"
        monkeypatch.setattr(supervisor, "ANSWER_SECS", 0.3)
        [hung] = frontends_of(os.getpid())
        os.kill(hung, signal.SIGSTOP)
        await until(
            lambda: bool(frontends_of(os.getpid())) and hung not in frontends_of(os.getpid())
        )
        assert await ask(door) == "hello"
    statuses = [vars(each)["status"] for each in caplog.records if "status" in vars(each)]
    assert "killed after 0.3 s without an answer" in statuses


async def test_files_in_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gateway").mkdir()
    for name in ("json.py", "uvloop.py", "gateway/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    async with serving(Log()) as door:
        assert await ask(door) == "hello"


async def test_one_that_answers_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_SECS", 0.2)
    async with serving(Log()) as door:
        assert await ask(door) == "hello"
        before = frontends_of(os.getpid())
        await asyncio.sleep(1)
        assert frontends_of(os.getpid()) == before


async def speak_no_http(door: ProcessHttpListener) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
    await asyncio.wait_for(reader.read(), WAIT_SECS)
    writer.close()
    await writer.wait_closed()


async def test_processes_hear_of_changes_of_the_log(tmp_path: Path) -> None:
    """Who speaks no HTTP is warned of by the process that has the connection."""
    file = tmp_path / "log"
    log = Log(LogSettings(file=str(file), warning=False))
    async with serving(log) as door:
        await speak_no_http(door)
        log.change({"warning": True})
        await asyncio.sleep(0)
        await speak_no_http(door)
        [pid] = frontends_of(os.getpid())
        await until(lambda: f" {pid} " in file.read_text())
        assert file.read_text().count("Invalid HTTP request") == 1
