"""Options of `sluice record`."""

import argparse

import pytest

from gateway.flags.record import add_flags

PARSER = argparse.ArgumentParser(exit_on_error=False)
add_flags(PARSER)


@pytest.mark.parametrize(("text", "secs"), [("30s", 30), ("10m", 600), ("1h", 3600)])
def test_the_time_of_a_recording_has_a_unit(text: str, secs: float) -> None:
    assert PARSER.parse_args(["m", "--out=d", f"--for={text}"]).secs == secs
    assert PARSER.parse_args(["m", "--out=d"]).secs == 600


@pytest.mark.parametrize("option", ["--for=10", "--for=0s", "--for=1d", "--count=0", "--redact=("])
def test_a_value_without_a_meaning_is_refused(option: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        PARSER.parse_args(["m", "--out=d", option])
