"""One event, one line, its fields behind it."""

import io
import logging
import re
from collections.abc import Iterator

import pytest

from gateway.observability.log import EventFormatter, set_up

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the gateway logs at INFO; the root logger is as before when the test ends."""
    root, ours = logging.getLogger(), logging.getLogger("sluice")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    stream = io.StringIO()
    set_up(logging.INFO, stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_an_event_is_a_line_with_its_fields(stream: io.StringIO) -> None:
    logging.getLogger("sluice.models").info("model ready", extra={"model": "llama", "version": 1})
    assert re.fullmatch(rf"{STAMP} INFO model ready model=llama version=1\n", stream.getvalue())


def test_the_time_is_utc() -> None:
    record = logging.makeLogRecord({"created": 1769860800.25, "levelname": "INFO", "msg": "up"})
    assert EventFormatter().format(record) == "2026-01-31T12:00:00.250Z INFO up"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        (7, "7"),
        (1.5, "1.5"),
        ("two words", '"two words"'),
        ("", '""'),
        ('say "hi"', r'"say \"hi\""'),
        ("line\nbreak", r'"line\nbreak"'),
        ("tab\tbed", r'"tab\tbed"'),
        ("key=value", '"key=value"'),
        ("caf\u00e9", "caf\u00e9"),
        ("'a' is not found", "\"'a' is not found\""),
    ],
)
def test_a_value_cannot_be_taken_for_more_than_one(
    stream: io.StringIO, value: object, shown: str
) -> None:
    logging.getLogger("sluice.http").warning("request refused", extra={"reason": value})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(f" WARNING request refused reason={shown}")


def test_an_event_below_the_level_is_not_told(stream: io.StringIO) -> None:
    logging.getLogger("sluice.execution").debug("token")
    assert stream.getvalue() == ""


def test_of_libraries_only_warnings_are_told(stream: io.StringIO) -> None:
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("beware")
    assert re.fullmatch(rf"{STAMP} WARNING beware\n", stream.getvalue())


def test_a_traceback_follows_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("no such token")
    except ValueError:
        logging.getLogger("sluice.execution").exception("execution failed", extra={"model": "m"})
    first, *traceback = stream.getvalue().splitlines()
    assert re.fullmatch(rf"{STAMP} ERROR execution failed model=m", first)
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "ValueError: no such token"


def test_setting_up_again_replaces_the_stream(stream: io.StringIO) -> None:
    second = io.StringIO()
    set_up(logging.WARNING, second)
    logging.getLogger("sluice").info("not told")
    logging.getLogger("sluice").warning("told once")
    assert stream.getvalue() == ""
    assert second.getvalue().count("told once") == 1
