"""Log lines, outputs, and settings that change at run time."""

import io
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.observability.log import LineFormatter, Log, read_log_settings, show_log_settings
from gateway.settings import LogFormat, LogSettings

PLACE = rf"{os.getpid()} test_log\.py:\d+\]"
STAMP = r"\d{4} \d\d:\d\d:\d\d\.\d{6}"


class Streams:
    """The console of a process that logs."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()

    def log(self, settings: LogSettings | None = None) -> Log:
        """Have everything logged here."""
        found = Log(settings)
        found.install(self.out, self.err)
        return found


@pytest.fixture
def streams() -> Iterator[Streams]:
    """A console; the loggers are as before when the test ends."""
    root, ours = logging.getLogger(), logging.getLogger("sluice")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield Streams()
    for handler in root.handlers:
        if isinstance(handler, logging.FileHandler) and handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


ours = logging.getLogger("sluice.test")


def test_an_event_is_a_line_with_its_fields(streams: Streams) -> None:
    streams.log()
    ours.info("model ready", extra={"model": "llama", "version": 1})
    line = rf'I{STAMP} {PLACE} "model ready model=llama version=1"\n'
    assert re.fullmatch(line, streams.out.getvalue())


def record(level: int = logging.INFO, text: str = "up") -> logging.LogRecord:
    created = {"created": 1769860800.25, "levelno": level, "msg": text, "process": 7}
    return logging.makeLogRecord({**created, "filename": "server.py", "lineno": 83})


@pytest.mark.parametrize(
    ("format_", "line"),
    [
        (LogFormat.DEFAULT, 'I0131 12:00:00.250000 7 server.py:83] "up"'),
        (LogFormat.ISO8601, '2026-01-31T12:00:00Z I 7 server.py:83] "up"'),
    ],
)
def test_the_time_is_utc(format_: LogFormat, line: str) -> None:
    assert LineFormatter(LogSettings(format=format_)).format(record()) == line


def test_a_line_of_json_has_the_fields_of_its_event(streams: Streams) -> None:
    streams.log(LogSettings(format=LogFormat.JSON))
    fields = {"model": "llama", "version": 1, "secs": math.nan, "time": "never", "file": Path("/a")}
    ours.info("model ready", extra=fields)
    found = json.loads(streams.out.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", found.pop("time"))
    assert re.fullmatch(r"test_log\.py:\d+", found.pop("place"))
    assert found == {
        "severity": "INFO",
        "message": "model ready",
        "logger": "sluice.test",
        "process": os.getpid(),
        "model": "llama",
        "version": 1,
        "secs": "nan",
        "file": "/a",
    }


def test_a_traceback_is_in_the_line_of_json(streams: Streams) -> None:
    streams.log(LogSettings(format=LogFormat.JSON))
    try:
        raise RuntimeError("a\nb")
    except RuntimeError:
        ours.exception("broken")
    (line,) = streams.err.getvalue().splitlines()
    assert json.loads(line)["exception"].endswith("RuntimeError: a\nb")


@pytest.mark.parametrize(
    ("level", "letter"),
    [
        (logging.DEBUG, "I"),
        (logging.INFO, "I"),
        (logging.WARNING, "W"),
        (logging.ERROR, "E"),
        (logging.CRITICAL, "E"),
    ],
)
def test_a_line_begins_with_the_letter_of_its_severity(level: int, letter: str) -> None:
    assert LineFormatter(LogSettings()).format(record(level)).startswith(f"{letter}0131 ")


def test_a_message_is_a_json_string_unless_that_is_not_wanted() -> None:
    text = 'say "hi"\nto caf\u00e9 \udce9'
    escaped = LineFormatter(LogSettings()).format(record(text=text))
    plain = LineFormatter(LogSettings(escape=False)).format(record(text=text))
    assert escaped.endswith('] "say \\"hi\\"\\nto caf\u00e9 ?"')
    assert plain.endswith('] say "hi"\nto caf\u00e9 ?')


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
    streams: Streams, value: object, shown: str
) -> None:
    streams.log(LogSettings(escape=False))
    ours.warning("request refused", extra={"reason": value})
    (line,) = streams.err.getvalue().splitlines()
    assert line.endswith(f"] request refused reason={shown}")


def test_warnings_and_errors_have_a_stream_of_their_own(streams: Streams) -> None:
    streams.log()
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        ours.log(level, "event")
    assert [line[0] for line in streams.out.getvalue().splitlines()] == ["I"]
    assert [line[0] for line in streams.err.getvalue().splitlines()] == ["W", "E"]


def test_a_file_gets_everything(streams: Streams, tmp_path: Path) -> None:
    file = tmp_path / "sluice.log"
    streams.log(LogSettings(file=str(file)))
    ours.info("one")
    ours.error("two")
    assert [line[0] for line in file.read_text().splitlines()] == ["I", "E"]
    assert streams.out.getvalue() == streams.err.getvalue() == ""


def test_a_moved_file_is_created_again(streams: Streams, tmp_path: Path) -> None:
    file = tmp_path / "sluice.log"
    streams.log(LogSettings(file=str(file)))
    logging.getLogger("sluice.x").info("before")
    file.rename(tmp_path / "sluice.log.1")
    logging.getLogger("sluice.x").info("after")
    assert '"before"' in (tmp_path / "sluice.log.1").read_text()
    assert '"after"' in file.read_text()


def test_a_file_that_cannot_be_written_is_reported_on_stderr(
    streams: Streams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "logs"
    home.mkdir()
    streams.log(LogSettings(file=str(home / "sluice.log")))
    shutil.rmtree(home)
    for _ in range(2):
        logging.getLogger("sluice.x").info("lost")
    assert capsys.readouterr().err.count("No such file") == 2
    home.mkdir()
    logging.getLogger("sluice.x").info("back")
    assert '"back"' in (home / "sluice.log").read_text()


def test_a_file_that_cannot_be_opened_is_an_error(streams: Streams, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        streams.log(LogSettings(file=str(tmp_path / "absent" / "sluice.log")))


def told(streams: Streams) -> str:
    """The letters of the events that were logged, of one for each severity."""
    before = len(streams.out.getvalue()), len(streams.err.getvalue())
    for level, text in (
        (logging.DEBUG, "d"),
        (logging.INFO, "i"),
        (logging.WARNING, "w"),
        (logging.ERROR, "e"),
    ):
        ours.log(level, text)
    new = streams.out.getvalue()[before[0] :] + streams.err.getvalue()[before[1] :]
    return "".join(line[-2] for line in new.splitlines())


def test_severities_can_change(streams: Streams) -> None:
    log = streams.log()
    assert told(streams) == "iwe"
    log.change({"verbose_level": 1})
    assert told(streams) == "diwe"
    log.change({"info": False})
    assert told(streams) == "dwe"
    log.change({"verbose_level": 0, "warning": False})
    assert told(streams) == "e"
    log.change({"error": False})
    assert told(streams) == ""
    assert log.settings == LogSettings(info=False, warning=False, error=False)


def test_the_format_can_change(streams: Streams) -> None:
    log = streams.log()
    log.change({"format": LogFormat.ISO8601})
    ours.info("up")
    assert re.fullmatch(rf'[0-9T:-]+Z I {PLACE} "up"\n', streams.out.getvalue())


def test_a_log_that_is_not_installed_changes_nothing_of_the_process() -> None:
    before = logging.getLogger("sluice").level
    log = Log()
    log.change({"verbose_level": 3})
    assert logging.getLogger("sluice").level == before
    assert log.settings.verbose_level == 3


def test_libraries_log_warnings_only(streams: Streams) -> None:
    streams.log(LogSettings(verbose_level=1))
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("beware")
    assert streams.out.getvalue() == ""
    assert re.fullmatch(rf'W{STAMP} {PLACE} "beware"\n', streams.err.getvalue())


def test_a_traceback_follows_its_line(streams: Streams) -> None:
    streams.log()
    try:
        raise ValueError("no such token")
    except ValueError:
        ours.exception("execution failed", extra={"model": "m"})
    first, *traceback = streams.err.getvalue().splitlines()
    assert re.fullmatch(rf'E{STAMP} {PLACE} "execution failed model=m"', first)
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "  ValueError: no such token"


FORGED = 'x\nI0131 12:00:00.000000 1 server.py:1] "forged"\r\x1b[31m\x9b31m\x7f\u2028\u202e'
SAFE = r"\r\u001b[31m\u009b31m\u007f\u2028\u202e"


def test_the_text_of_an_exception_begins_no_line(streams: Streams) -> None:
    streams.log()
    try:
        try:
            raise ValueError(FORGED)
        except ValueError as error:
            raise KeyError(FORGED) from error
    except KeyError:
        ours.exception("execution failed")
    lines = streams.err.getvalue().split("\n")
    assert [line[0] for line in lines if line and line[0] != " "] == ["E", "T"]
    assert f'  I0131 12:00:00.000000 1 server.py:1] "forged"{SAFE}' in lines


@pytest.mark.parametrize("escape", [True, False])
def test_no_text_of_a_client_controls_a_terminal(streams: Streams, escape: bool) -> None:
    streams.log(LogSettings(escape=escape))
    ours.warning("printed", extra={"text": FORGED})
    ours.warning("printed: %s", FORGED, extra={"text": "a"})
    first, second, *more = streams.err.getvalue().split("\n")
    assert all(line.isprintable() for line in (first, second, *more))
    if escape:
        assert more == [""]
        assert json.loads(second.partition("] ")[2]) == f"printed: {FORGED} text=a"


def test_installing_again_replaces_the_streams(streams: Streams) -> None:
    streams.log()
    second = Streams()
    second.log()
    ours.warning("told once")
    assert streams.err.getvalue() == ""
    assert second.err.getvalue().count("told once") == 1


def refused(text: str) -> InferenceError:
    return InferenceError(Code.UNAVAILABLE, f"no format: {text}")


def test_six_settings_are_shown_in_tritons_order() -> None:
    assert list(show_log_settings(LogSettings(file="/tmp/x", verbose_level=2)).items()) == [
        ("log_file", "/tmp/x"),
        ("log_info", True),
        ("log_warning", True),
        ("log_error", True),
        ("log_verbose_level", 2),
        ("log_format", "default"),
    ]


def test_settings_become_fields_and_unknown_ones_are_ignored() -> None:
    wanted = {
        "log_info": False,
        "log_warning": True,
        "log_error": False,
        "log_verbose_level": 2**32 - 1,
        "log_format": "ISO8601",
        "nope": 1,
    }
    assert read_log_settings(wanted, refused, Log().file_named) == {
        "info": False,
        "warning": True,
        "error": False,
        "verbose_level": 2**32 - 1,
        "format": LogFormat.ISO8601,
    }


@pytest.mark.parametrize(
    ("wanted", "code", "text"),
    [
        (
            {"log_file": "x"},
            Code.UNSUPPORTED,
            "log file location can not be updated through network protocol",
        ),
        ({"log_format": "x"}, Code.UNAVAILABLE, "no format: x"),
        (
            {"log_verbose_level": 2**32},
            Code.INVALID_ARG,
            "Unable to parse 'log_verbose_level', value is out of range [ 0, 4294967295 ], got: "
            "4294967296",
        ),
    ],
)
def test_an_invalid_setting_is_refused(wanted: dict[str, object], code: Code, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_log_settings(wanted, refused, Log().file_named)
    assert (caught.value.code, caught.value.message) == (code, text)
