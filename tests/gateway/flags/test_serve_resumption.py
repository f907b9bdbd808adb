"""The flags of resumable streams become settings, and bad values are refused."""

import argparse

import pytest

from gateway.flags import serve as flags
from gateway.settings import ResumptionSettings


def parse(*arguments: str) -> ResumptionSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_flags(parser)
    return flags.settings(parser.parse_args(["--model-repository=m", *arguments])).resumption


def test_without_flags_the_defaults_hold() -> None:
    assert parse() == ResumptionSettings(
        grace_secs=30.0, buffer_size=1024 * 1024, total_size=512 * 1024 * 1024
    )


def test_each_flag_is_a_setting() -> None:
    found = parse(
        "--resumable-grace-secs=0.5", "--resumable-buffer-size=1", "--resumable-total-size=2"
    )
    assert found == ResumptionSettings(grace_secs=0.5, buffer_size=1, total_size=2)


@pytest.mark.parametrize("name", ["grace-secs", "buffer-size", "total-size"])
@pytest.mark.parametrize("value", ["0", "-1", "much"])
def test_a_bad_value_is_refused_with_what_was_found(name: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=value):
        parse(f"--resumable-{name}={value}")
