"""Durations with a unit."""

import pytest

from gateway.durations import read_seconds


@pytest.mark.parametrize(
    ("text", "secs"),
    [("0s", 0), ("250ms", 0.25), ("1.5h", 5400), ("2m", 120), ("90d", 7_776_000), ("1w", 604_800)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, secs: float) -> None:
    assert read_seconds(text) == secs


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "1 s", "1S", ".5s", "1e3s", f"{10**9}s"])
def test_another_text_is_no_duration(text: str) -> None:
    assert read_seconds(text) is None
