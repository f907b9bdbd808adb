"""Output of models: by the line, cut, and no more than a log can bear."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator

import pytest

from backends.python import worker_process as module
from backends.python.worker_process import LINE_BYTES, LINES_PER_SECOND, LineLimit, WorkerOutput
from tests.builders import WAIT_SECS, settle


class Pipe:
    """A pipe whose end is read by the module under test."""

    def __init__(self) -> None:
        readable, self.end = os.pipe()
        self.printed = WorkerOutput(readable, {"model": "m"})

    def print(self, data: bytes) -> None:
        os.write(self.end, data)


@pytest.fixture
async def pipe() -> Iterator[Pipe]:
    found = Pipe()
    yield found
    os.close(found.end)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sluice.python")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECS):
        while not condition():  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0)


async def test_each_line_is_one_of_the_log(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    pipe.print(b"one\ntw")
    pipe.print(b"o\nthree")
    await until(lambda: len(lines(caplog)) == 2)
    assert lines(caplog) == ["printed: one", "printed: two"]
    pipe.printed.close()
    assert lines(caplog) == ["printed: one", "printed: two", "printed: three"]


async def test_bytes_that_are_no_text_are_replaced(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    pipe.print(b"\xff\n")
    pipe.printed.close()
    assert lines(caplog) == ["printed: \N{REPLACEMENT CHARACTER}"]


async def test_a_long_line_is_cut_and_its_rest_dropped(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        pipe.print(b"x" * LINE_BYTES)
        await asyncio.sleep(0)
    pipe.print(b"\nnext\n")
    pipe.printed.close()
    first, second = lines(caplog)
    assert first == "printed: " + "x" * LINE_BYTES
    assert second == "printed: next"


async def test_too_many_lines_are_counted_instead(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    pipe.print(b"line\n" * (LINES_PER_SECOND + 7))
    pipe.printed.close()
    assert len(lines(caplog)) == LINES_PER_SECOND
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.getMessage() == "output lines dropped"
    assert vars(warning)["lines_dropped"] == 7


async def test_a_model_that_prints_without_end_is_held_back(
    pipe: Pipe, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BYTES_PER_PAUSE", 10)
    monkeypatch.setattr(module, "PAUSE_SECS", 3600)
    pipe.print(b"0123456789\n")
    await until(lambda: len(lines(caplog)) == 1)
    pipe.print(b"later\n")
    await settle()
    assert lines(caplog) == ["printed: 0123456789"]
    pipe.printed.close()
    assert lines(caplog)[1:] == ["printed: later"]


def test_a_limit_is_one_of_each_second() -> None:
    now = [0.0]
    limit = LineLimit(lambda: now[0])
    assert sum(limit.allows() for _ in range(LINES_PER_SECOND + 5)) == LINES_PER_SECOND
    assert limit.take_dropped() == 5
    assert limit.take_dropped() == 0
    now[0] = 1.0
    assert limit.allows()
