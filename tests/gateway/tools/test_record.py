"""The files of `sluice record`."""

import json
from pathlib import Path

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
