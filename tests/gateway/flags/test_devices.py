"""Flags about GPUs become settings."""

import argparse

import pytest

from gateway.flags import devices as flags
from gateway.memory_settings import GpuSettings


def parse(*arguments: str) -> GpuSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_gpu_flags(parser)
    return flags.gpu_settings(parser.parse_args(arguments))


def test_without_flags_gpus_are_used_as_by_triton() -> None:
    assert parse() == GpuSettings(min_compute_capability=(6, 0), memory_limits={})


@pytest.mark.parametrize(
    ("text", "minimum"), [("7.5", (7, 5)), ("8", (8, 0)), ("12.0", (12, 0)), ("0.0", (0, 0))]
)
def test_the_least_compute_capability_is_a_number(text: str, minimum: tuple[int, int]) -> None:
    assert parse(f"--min-supported-compute-capability={text}").min_compute_capability == minimum


def test_each_gpu_may_have_a_limit() -> None:
    flags = ("--model-load-gpu-limit=0:0.5", "--model-load-gpu-limit=1:.25")
    assert parse(*flags).memory_limits == {0: 0.5, 1: 0.25}
    assert parse("--model-load-gpu-limit=0:1", "--model-load-gpu-limit=0:0").memory_limits == {0: 0}


def test_sizes_of_pools_are_taken_as_triton_takes_them() -> None:
    pools = ("--cuda-memory-pool-byte-size=0:67108864", "--cuda-memory-pool-byte-size=1:0")
    assert parse("--pinned-memory-pool-byte-size=268435456", *pools) == parse()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--min-supported-compute-capability", "new"),
        ("--min-supported-compute-capability", "-1.0"),
        ("--min-supported-compute-capability", "7.55"),
        ("--model-load-gpu-limit", "0.5"),
        ("--model-load-gpu-limit", "0:1.5"),
        ("--model-load-gpu-limit", "0:-1"),
        ("--model-load-gpu-limit", "x:0.5"),
        ("--model-load-gpu-limit", "0:half"),
        ("--pinned-memory-pool-byte-size", "1G"),
        ("--cuda-memory-pool-byte-size", "67108864"),
        ("--cuda-memory-pool-byte-size", "0:1G"),
        ("--cuda-memory-pool-byte-size", "x:1"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_found(flag: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=value):
        parse(f"{flag}={value}")
