"""The audit log: its lines, its file, and a disk that does not take them."""

import fcntl
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.json_lines import MOST_CHARS
from gateway.policy import audit
from gateway.policy.areas import AREA_OF_METHOD_CHANGE, AREA_OF_ROUTE_CHANGE, Area
from gateway.policy.audit import AuditedChange, AuditLog, action_of
from gateway.policy.caller import Caller
from gateway.rollouts.changes import RolloutAction
from tests.serving import wait_until

LOAD = AuditedChange(area=Area.MODEL_REPOSITORY, action="load", by="server", about={"model": "a"})
PIPE_BYTES = 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def opened(file: Path) -> Iterator[AuditLog]:
    log = AuditLog(file)
    log.open()
    yield log
    log.close()


def change(**about: Any) -> AuditedChange:
    return AuditedChange(area=Area.LOGGING, action="settings", by="client", about=about)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wait_lines(file: Path, count: int) -> list[dict[str, Any]]:
    wait_until(lambda: file.exists() and len(lines(file)) == count, f"{count} lines are written")
    return lines(file)


def test_a_change_is_a_line_with_its_caller_and_its_result(opened: AuditLog, file: Path) -> None:
    asked = AuditedChange(
        area=Area.SHARED_MEMORY,
        action="register",
        by="client",
        about={"region": "r"},
        wire="http",
        route="/v2/systemsharedmemory/region/{region}/register",
        address="10.0.0.1",
        caller=Caller(tenant="team", key_id="7K3QW2MZ"),
    )
    opened.add(asked, "400", "no such object")
    opened.add(LOAD)
    first, second = wait_lines(file, 2)
    assert first.pop("time") < second.pop("time")
    assert first == {
        "area": "shared-memory",
        "action": "register",
        "region": "r",
        "by": "client",
        "wire": "http",
        "route": "/v2/systemsharedmemory/region/{region}/register",
        "address": "10.0.0.1",
        "tenant": "team",
        "key": "7K3QW2MZ",
        "result": "400",
        "error": "no such object",
    }
    loaded = {"area": "model-repository", "action": "load", "model": "a", "by": "server"}
    assert second == {**loaded, "result": "ok"}


def test_lines_keep_the_order_of_the_changes_also_those_before_the_file_is_open(file: Path) -> None:
    log = AuditLog(file)
    for number in range(50):
        log.add(change(number=number))
    log.open()
    for number in range(50, 500):
        log.add(change(number=number))
    log.close()
    assert [each["number"] for each in lines(file)] == list(range(500))
    assert log.failures == 0


def test_every_action_has_a_name() -> None:
    found = {action_of(path) for path in (*AREA_OF_ROUTE_CHANGE, *AREA_OF_METHOD_CHANGE)}
    others = {"load", "unload", "labels", "change", "record", "register", "unregister", "settings"}
    assert found == others | {f"rollout-{each}" for each in RolloutAction}


@pytest.mark.parametrize(
    "text",
    ["a\nb", "a\r\nb", "\x1b[31mred", "\x9b31m", "\x7f", "\u2028", "\u202e", "\x00", "é", "\udc80"],
)
def test_no_text_begins_a_line_or_controls_a_terminal(
    opened: AuditLog, file: Path, text: str
) -> None:
    opened.add(change(**{text: [text], "settings": {text: text}}), text, text)
    (found,) = wait_lines(file, 1)
    shown = text.encode(errors="replace").decode()
    assert found["settings"] == {shown: shown}
    written = file.read_bytes()
    assert written.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in written[:-1])


def test_texts_lists_and_objects_of_clients_are_cut(opened: AuditLog, file: Path) -> None:
    lists: Any = []
    objects: Any = {}
    for _ in range(5000):
        lists, objects = [lists], {"a": objects}
    huge = {str(number): "x" * 5000 for number in range(5000)}
    odd = {"number": 10**5000, "real": float("nan")}
    opened.add(change(lists=lists, objects=objects, huge=huge, **odd), error="e" * 5000)
    (found,) = wait_lines(file, 1)
    assert found["number"] == found["real"] == "..."
    assert len(found["huge"]) == audit.MOST_MEMBERS
    assert len(found["error"]) == MOST_CHARS + 3
    assert len(file.read_bytes()) < 40_000


def test_a_new_file_is_private_and_one_that_exists_is_continued(file: Path) -> None:
    for _ in range(2):
        log = AuditLog(file)
        log.open()
        log.add(LOAD)
        log.close()
    assert len(lines(file)) == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    log = AuditLog(file)
    log.open()
    log.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_file_that_is_moved_is_created_again(opened: AuditLog, file: Path) -> None:
    opened.add(change(number=1))
    wait_lines(file, 1)
    moved = file.rename(file.with_suffix(".1"))
    opened.add(change(number=2))
    wait_lines(file, 1)
    file.unlink()
    file.write_text("")
    opened.add(change(number=3))
    assert [each["number"] for each in wait_lines(file, 1)] == [3]
    assert [each["number"] for each in lines(moved)] == [1]
    assert opened.failures == 0


def test_a_full_disk_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(Path("/dev/full"))
    log.open()
    with caplog.at_level(logging.ERROR, "sluice.audit"):
        for _ in range(3):
            log.add(LOAD)
        wait_until(lambda: log.failures == 3, "3 lines are dropped")
        log.close()
    (record,) = caplog.records
    assert record.message == "audit log not written"
    assert vars(record)["reason"] == "No space left on device"


def test_a_missing_folder_is_counted_and_logged_again_after_a_line_that_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = folder / "audit.log"
    log = AuditLog(file)
    log.open()
    folder.rename(tmp_path / "moved")
    log.add(change(number=1))
    wait_until(lambda: log.failures == 1, "a line is dropped")
    folder.mkdir()
    log.add(change(number=2))
    assert [each["number"] for each in wait_lines(file, 1)] == [2]
    folder.rename(tmp_path / "moved again")
    log.add(change(number=3))
    log.close()
    assert log.failures == len(caplog.records) == 2


def test_a_slow_pipe_delays_no_change_and_a_part_of_a_line_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    log = AuditLog(path)
    log.open()
    log.add(change(values=["x" * MOST_CHARS] * audit.MOST_MEMBERS))
    log.add(change(number=2))
    wait_until(lambda: log.failures == 2, "2 lines are dropped")
    part = os.read(reader, PIPE_BYTES)
    log.add(change(number=3))
    log.close()
    whole = part + os.read(reader, PIPE_BYTES)
    os.close(reader)
    torn, line = whole.decode().splitlines()
    assert len(torn) == PIPE_BYTES
    assert json.loads(line)["number"] == 3


def test_a_line_that_has_no_form_in_json_is_counted_and_the_next_one_written(
    opened: AuditLog, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    with caplog.at_level(logging.ERROR):
        for about in ({"values": cyclic}, {"path": Path("a")}, {"number": 3}):
            opened._file.add(about)  # noqa: SLF001 - callers give what JSON has
        wait_until(lambda: file.read_text() != "", "the third line is written")
    assert lines(file) == [{"number": 3}]
    assert opened.failures == 2
    assert [each.message for each in caplog.records] == ["audit log not written"]


def test_beyond_the_bound_of_waiting_lines_changes_are_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MOST_LINES", 5)
    log = AuditLog(file)
    for number in range(8):
        log.add(change(number=number))
    assert log.failures == 3
    log.open()
    log.close()
    assert [each["number"] for each in lines(file)] == [0, 1, 2, 3, 4]


def test_of_many_refused_changes_some_have_a_line_and_the_others_are_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [0.0] * 150 + [1.0] * 101
    monkeypatch.setattr(audit.time, "monotonic", lambda: times.pop(0))
    log = AuditLog(file)
    for _ in range(150):
        log.add(LOAD, "403", refused=True)
    log.add(LOAD)
    for _ in range(101):
        log.add(LOAD, "403", refused=True)
    monkeypatch.undo()
    log.open()
    log.close()
    found = lines(file)
    assert [each["result"] for each in found[:-1]] == ["403"] * 100 + ["ok"] + ["403"] * 100
    omitted = {number: each["omitted"] for number, each in enumerate(found) if "omitted" in each}
    assert omitted == {100: 50, 201: 1}
    assert found[-1].keys() == {"time", "action", "omitted"}
    assert log.failures == 0


@pytest.mark.parametrize("kind", ["folder", "missing", "pipe"])
def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path, kind: str) -> None:
    path = {"folder": tmp_path, "missing": tmp_path / "no" / "file", "pipe": tmp_path / "pipe"}
    os.mkfifo(tmp_path / "pipe")  # without a reader
    log = AuditLog(path[kind])
    with pytest.raises(OSError, match=r"Is a directory|No such file|No such device"):
        log.open()
    log.close()
