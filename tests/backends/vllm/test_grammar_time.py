"""Bounds of the engine's work for the shapes of answers, in time and in number."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.serving import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


def limit(secs: float, at_once: int) -> Callable[[Callable[[], str]], str]:
    from backends.vllm.grammar_time import TimeLimit

    return TimeLimit(secs, at_once).compute


def test_a_result_that_is_computed_in_time_is_returned() -> None:
    assert limit(10, 1)(lambda: "grammar") == "grammar"


def test_a_failure_is_raised_unchanged() -> None:
    def fail() -> str:
        raise KeyError("of its own")

    with pytest.raises(KeyError, match="of its own"):
        limit(10, 1)(fail)


def test_what_takes_too_long_is_given_up_and_keeps_its_place_until_it_ends() -> None:
    ended, compute = threading.Event(), limit(0.2, 1)

    def linger() -> str:
        ended.wait(60)
        return "late"

    with pytest.raises(TimeoutError, match=r"longer than 0\.2 s"):
        compute(linger)
    with pytest.raises(TimeoutError, match="others"):
        compute(lambda: "next")
    ended.set()

    def is_free() -> bool:
        with suppress(TimeoutError):
            return compute(lambda: "next") == "next"
        return False

    wait_until(is_free, "its place is free")
