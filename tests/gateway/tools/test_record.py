"""The files of `sluice record`."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from gateway.errors import InferenceError
from gateway.flags.values import url
from gateway.tools import record
from gateway.tools.record import GoldenFolder


def test_a_file_of_a_recording_that_was_killed_stays_and_the_next_has_another_name(
    tmp_path: Path,
) -> None:
    (tmp_path / ".recorded-0001.json").write_text("{")
    folder = GoldenFolder(tmp_path)
    written = [folder.add({"why": why}, {}) for why in "ab"]
    assert [each.name for each in written] == ["recorded-0002.json", "recorded-0003.json"]
    assert [json.loads(each.read_text())["why"] for each in written] == ["a", "b"]
    assert (tmp_path / ".recorded-0001.json").read_text() == "{"


def test_a_recording_that_never_began_has_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"model": "m", "version": "", "count": 1, "secs": 1.0, "redact": ""}
    nowhere = url("http://127.0.0.1:9")
    with pytest.raises(InferenceError, match=r"no answer from http://127\.0\.0\.1:9"):
        record.run(Namespace(**asked, out=tmp_path, url=nowhere), {}, Console())
    assert "recorded in" not in capsys.readouterr().out
