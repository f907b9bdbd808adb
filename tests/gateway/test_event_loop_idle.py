"""An idle loop has no timers of the watch or of the listeners; its blocks are found."""

import asyncio
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from gateway.event_loop import LoopWatch
from tests.builders import soon
from tests.serving import Serving, serving, wait_until, write_model

IDENTITY = """backend: "identity"
input { name: "INPUT" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [-1] }
"""
MOST_WAKEUPS = 8
"""Wake-ups of an idle server in a second: five of the watch, and one each of rare timers."""


class CountingLoop(uvloop.Loop):
    """The loop of the server; counts callbacks of the watch."""

    armed = 0

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        self._count(callback)
        return super().call_later(delay, callback, *args, **named)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._count(callback)
        return super().call_soon_threadsafe(callback, *args, **named)

    def _count(self, callback: object) -> None:
        self.armed += isinstance(getattr(callback, "__self__", None), LoopWatch)


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main)


async def until_idle() -> None:
    """Wait until half a second passes without a callback of the watch."""

    async def found() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        armed = -1
        while armed != loop.armed:
            armed = loop.armed
            await asyncio.sleep(0.5)

    await soon(found())


def hold_the_loop() -> None:
    time.sleep(0.8)


class Lines(logging.Handler):
    """Keeps the first line of the watch."""

    def __init__(self) -> None:
        super().__init__()
        self.first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first.done():
            self.first.set_result(record.__dict__)


async def logged_after(block: Callable[[], object]) -> dict[str, Any]:
    """The line of the watch about a block that begins in an idle loop."""
    log = logging.getLogger("sluice.loop")
    with LoopWatch():
        await until_idle()
        lines = Lines()
        log.addHandler(lines)
        try:
            block()
            return await soon(lines.first)
        finally:
            log.removeHandler(lines)


def test_an_idle_loop_has_no_timer_of_the_watch() -> None:
    async def main() -> None:
        with LoopWatch():
            await until_idle()

    run(main())


def test_a_block_that_begins_in_an_idle_loop_is_logged_with_its_stack() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        line = await logged_after(lambda: loop.call_later(0.05, hold_the_loop))
        assert line["ms"] >= 500
        assert "hold_the_loop" in line["stack"].split("<")[0]

    run(main())


def test_an_interpreter_lock_that_another_thread_holds_blocks_an_idle_loop() -> None:
    hold_the_lock = threading.Thread(target=ctypes.PyDLL(None).usleep, args=(800_000,))

    async def main() -> None:
        line = await logged_after(hold_the_lock.start)
        assert line["ms"] >= 500
        await asyncio.to_thread(hold_the_lock.join)

    run(main())


def wakeups(server: Serving) -> int:
    """Number of times that threads of the process have slept."""
    threads = Path(f"/proc/{server.process.pid}/task")
    texts = ((threads / each / "status").read_text() for each in os.listdir(threads))
    key = "\nvoluntary_ctxt_switches:"
    return sum(int(text.partition(key)[2].split(maxsplit=1)[0]) for text in texts)


def test_an_idle_server_sleeps(tmp_path: Path) -> None:
    write_model(tmp_path, "m", IDENTITY)
    with serving(tmp_path) as server:

        def sleeps() -> bool:
            before = wakeups(server)
            time.sleep(2)
            return wakeups(server) - before <= 2 * MOST_WAKEUPS

        wait_until(sleeps, f"at most {MOST_WAKEUPS} wake-ups a second")
