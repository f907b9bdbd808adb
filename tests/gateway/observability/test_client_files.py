"""Log and trace files that clients name: those of the operator, and new ones below a folder."""

import errno
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.observability import tracer as tracer_module
from gateway.observability.client_files import client_file
from gateway.observability.log import Log
from gateway.observability.tracer import Tracer
from gateway.settings import LogSettings, TraceSettings

REFUSED = "expected a file below the folder of --log-directory"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the operator, and around it what clients may not reach."""
    found = tmp_path / "logs"
    (found / "inner").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "logs2").mkdir()
    (found / "out").symlink_to(tmp_path)
    (found / "link").symlink_to(tmp_path / "secret")
    (found / "circle").symlink_to(found / "circle")
    os.mkfifo(found / "pipe")
    return found


@pytest.mark.parametrize("name", ["a.log", "inner/a.log", "inner/../a.log", "./a.log", "\u00e9"])
def test_a_file_below_the_folder_is_allowed_by_either_path(folder: Path, name: str) -> None:
    expected = str((folder / name).resolve())
    assert client_file(name, (), str(folder), "log") == expected
    assert client_file(f"{folder}/{name}", (), str(folder), "log") == expected


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "inner/../../secret", "out/secret", "link", "circle", "../logs2/a", "pipe"),
        *("", ".", "inner", "inner/..", "missing/a", "a\0b", "a\nb", "/etc/passwd", "~/a"),
        "a" * 300,
    ],
)
def test_any_other_path_is_refused_in_the_same_words(folder: Path, name: str) -> None:
    for each in {name, f"{folder}/{name}"}:
        with pytest.raises(InferenceError) as caught:
            client_file(each, (), str(folder), "log")
        assert caught.value.code is Code.INVALID_ARG
        assert caught.value.message.endswith(REFUSED)
        assert str(folder) not in caught.value.message


@pytest.mark.parametrize("name", ["b.log", "/b.log", "", 3, None, ["a.log"], {}])
def test_without_a_folder_only_known_files_are_allowed(name: object) -> None:
    assert client_file("a.log", ("a.log",), "", "log") == "a.log"
    with pytest.raises(InferenceError) as caught:
        client_file(name, ("a.log",), "", "log")
    text = "log file location can not be updated through network protocol"
    assert (caught.value.code, caught.value.message) == (Code.UNSUPPORTED, text)


# The log.


@pytest.fixture
def console() -> Iterator[io.StringIO]:
    """A console; the loggers are as before when the test ends."""
    root, ours = logging.getLogger(), logging.getLogger("sluice")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield io.StringIO()
    for handler in root.handlers:
        if isinstance(handler, logging.FileHandler) and handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


ours = logging.getLogger("sluice.test")


def test_lines_go_to_the_named_file_and_back_to_the_first_one(
    folder: Path, console: io.StringIO
) -> None:
    log = Log(LogSettings(directory=str(folder)))
    log.install(console, console)
    told: list[LogSettings] = []
    log.on_change(told.append)
    log.change({"file": log.file_named("a.log")})
    ours.warning("one")
    log.change({"file": log.file_named(log.settings.file), "warning": True})
    log.change({"file": log.file_named("")})
    ours.warning("two")
    assert [text in (folder / "a.log").read_text() for text in ("one", "two")] == [True, False]
    assert [text in console.getvalue() for text in ("one", "two")] == [False, True]
    assert [each.file for each in told] == [f"{folder}/a.log", f"{folder}/a.log", ""]


class Unopened(logging.Handler):
    """A log file on a full disk."""

    def __init__(self, path: str, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_a_file_that_cannot_be_opened_changes_nothing(
    folder: Path, console: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(LogSettings(directory=str(folder)))
    log.install(console, console)
    monkeypatch.setattr("gateway.observability.log.LogFile", Unopened)
    with pytest.raises(InferenceError) as caught:
        log.change({"file": log.file_named("a.log"), "warning": False})
    text = "log file 'a.log': it cannot be opened: No space left on device"
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, text)
    ours.warning("one")
    assert "one" in console.getvalue()
    assert log.settings.file == ""


def test_a_program_decides_on_its_log(folder: Path) -> None:
    with pytest.raises(InferenceError, match="can not be updated"):
        Log(LogSettings(directory=str(folder))).file_named("a.log")


# Traces.


def trace(tracer: Tracer, model: str = "m") -> None:
    found = tracer.begin(model)
    assert found is not None
    found.stamp("A", 1)
    found.ended(2)
    found.sent()


def started(folder: Path) -> Tracer:
    file = str(folder / "first")
    return Tracer(TraceSettings(file=file, levels=("TIMESTAMPS",), rate=1, directory=str(folder)))


def test_each_setting_has_its_file_of_traces(folder: Path) -> None:
    tracer = started(folder)
    trace(tracer)
    tracer.update("", {"file": tracer.file_named(["second"])})
    trace(tracer)
    tracer.update("m", {"file": tracer.file_named([f"{folder}/third"])})
    trace(tracer)
    trace(tracer, "other")
    tracer.update("m", {"file": tracer.file_named(None)})
    trace(tracer)
    tracer.update("", {"file": tracer.file_named([str(folder / "first")])})
    trace(tracer)
    tracer.close()
    found = {
        name: sorted({each["id"] for each in json.loads((folder / name).read_text())})
        for name in ("first", "second", "third")
    }
    assert found == {"first": [1, 6], "second": [2, 4, 5], "third": [3]}


def test_traces_never_replace_a_file_of_another_kind(folder: Path) -> None:
    (folder / "server.log").write_text("lines")
    with pytest.raises(InferenceError) as caught:
        started(folder).file_named(["server.log"])
    text = "trace file 'server.log': it exists, expected a new file"
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, text)


def test_clients_name_a_bounded_number_of_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_module, "MOST_FILES", 3)
    tracer = started(folder)
    for name in ("a", "b", "a"):
        tracer.update("", {"file": tracer.file_named([name])})
    with pytest.raises(InferenceError, match="there are 3 files of traces"):
        tracer.file_named(["c"])


@pytest.mark.parametrize("values", [[], ["a", "b"]])
def test_a_file_of_traces_is_one_text(folder: Path, values: list[str]) -> None:
    with pytest.raises(InferenceError, match="can not be updated"):
        started(folder).file_named(values)
