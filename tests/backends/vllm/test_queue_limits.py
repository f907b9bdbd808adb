"""The limits for which requests wait in the queue of an engine."""

from types import SimpleNamespace

import pytest

from backends.vllm.queue_limits import KV_CACHE, MOST_CHANGES, QueueLimits

SEQUENCES = "max_num_seqs (8)"


def step(running: int, usage: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(num_running_reqs=running, kv_cache_usage=usage)


@pytest.mark.parametrize(
    ("running", "usage", "limit"),
    [(8, 0.2, SEQUENCES), (8, 1.0, SEQUENCES), (7, 0.95, KV_CACHE), (7, 0.5, ""), (0, 0.0, "")],
)
def test_a_full_engine_names_its_limit(running: int, usage: float, limit: str) -> None:
    limits = QueueLimits(8)
    limits.note(step(running, usage), 5.0)
    assert limits.at(5.5) == limit


def test_the_limit_is_that_of_the_last_step_before_the_request_was_scheduled() -> None:
    limits = QueueLimits(8)
    for secs, each in ((1.0, step(8)), (2.0, step(8)), (3.0, step(2)), (4.0, step(2, 1.0))):
        limits.note(each, secs)
    found = [limits.at(secs) for secs in (0.0, 0.9, 1.0, 2.5, 3.5, 4.5)]
    assert found == ["", "", SEQUENCES, SEQUENCES, "", KV_CACHE]


def test_the_latest_changes_are_kept() -> None:
    limits = QueueLimits(8)
    for secs in range(2 * MOST_CHANGES):
        limits.note(step(8 * (secs % 2)), float(secs))
    assert limits.at(1.5) == ""
    assert limits.at(2 * MOST_CHANGES) == SEQUENCES
