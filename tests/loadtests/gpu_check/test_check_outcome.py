"""Rows of figures, and the outcome of their part."""

import io
import json

from rich.console import Console

from loadtests.gpu_check.check import Outcome, Row, Status, judged, read_outcome, table
from loadtests.support.results import Better

GOOD = Row(name="infer/s", gateway=50.0, alone=100.0, better=Better.HIGHER)
WRONG = Row(name="error", gateway=0.5, ok=False, expected="at most 0.001")


def test_a_part_passes_if_every_row_is_right() -> None:
    assert judged("p", [GOOD], 1.0).status is Status.PASSED
    failed = judged("p", [GOOD, WRONG], 1.0)
    assert failed.status is Status.FAILED
    assert failed.reason == "error: found 0.5, expected at most 0.001"


def test_an_outcome_survives_being_written_down() -> None:
    outcome = judged("p", [GOOD, WRONG], 1.5)
    told = json.loads(json.dumps(outcome.as_json()))
    assert told["rows"][0]["ratio"] == 0.5
    assert read_outcome(told) == outcome


def test_the_table_shows_every_row_and_reason() -> None:
    skipped = Outcome(part="q", status=Status.SKIPPED, reason="not installed: [vllm]")
    console = Console(file=io.StringIO(), width=120)
    console.print(table("t", [judged("p", [GOOD, WRONG], 1.0), skipped]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("infer/s", "0.50", "wrong: expected at most 0.001", "skipped", "[vllm]"):
        assert part in text
