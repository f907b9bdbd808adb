"""Pauses of a replica after failures."""

import pytest

from gateway.fleet.pauses import Pauses


def failed(*times: float) -> Pauses:
    found = Pauses()
    for each in times:
        found.fail(each)
    return found


@pytest.mark.parametrize(
    ("times", "until"),
    [((0, 1, 9.9), 14.9), ((0, 0, 0), 5), ((0, 1, 10), None), ((0, 1), None)],
)
def test_three_failures_within_ten_seconds_begin_a_pause(
    times: tuple[float, ...], until: float | None
) -> None:
    found = failed(*times).left_out_until
    assert found == (until if until is not None else float("-inf"))


def test_failures_of_older_requests_do_not_prolong_a_pause() -> None:
    pauses = failed(0, 0, 0)
    for _ in range(9):
        pauses.fail(1)
    assert pauses.left_out_until == 5


def test_one_request_tries_a_replica_after_a_pause_and_each_failure_doubles_the_next() -> None:
    pauses, now, lengths = failed(0, 0, 0), 5.0, []
    for _ in range(6):
        pauses.send(now)
        assert pauses.left_out_until > now, "others wait for the first request"
        pauses.fail(now + 1)
        lengths.append(pauses.left_out_until - now - 1)
        now = pauses.left_out_until
    assert lengths == [10, 20, 40, 60, 60, 60]


def test_an_answer_to_the_request_that_tries_ends_the_pauses() -> None:
    pauses = failed(0, 0, 0)
    pauses.answer()
    assert pauses.left_out_until == 5, "an older request was answered"
    pauses.send(5)
    pauses.answer()
    pauses.fail(6)
    assert pauses.left_out_until < 6
    pauses.fail(6)
    pauses.fail(6)
    assert pauses.left_out_until == 11
