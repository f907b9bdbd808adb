"""Priorities, timeouts and limits of the queue, with times passed in."""

import random
from collections import Counter

import pytest

from gateway.config.scheduling import DynamicBatching, QueuePolicy, TimeoutAction
from gateway.schedulers.queue import NS_PER_US, QueueRules, RequestQueue, Waiting
from tests.gateway.schedulers.queues import names, waiting

REJECT = QueuePolicy(default_timeout_microseconds=1000)
DELAY = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_microseconds=1000)


def rules(policy: QueuePolicy | None = None, **fields: object) -> QueueRules:
    return QueueRules(DynamicBatching(default_queue_policy=policy, **fields))  # type: ignore[arg-type]


def queue_of(*members: Waiting, policy: QueuePolicy | None = None, levels: int = 0) -> RequestQueue:
    queue = RequestQueue(rules(policy, priority_levels=levels, default_priority_level=1))
    for each in members:
        queue.push(each)
    return queue


@pytest.mark.parametrize(
    ("priority", "level"), [(0, 2), (1, 1), (2, 2), (3, 3), (4, 2), (2**64 - 1, 2)]
)
def test_an_unknown_priority_is_the_default(priority: int, level: int) -> None:
    assert rules(priority_levels=3, default_priority_level=2).level(priority) == level


def test_without_levels_priorities_are_ignored() -> None:
    assert rules().level(7) == 0


@pytest.mark.parametrize(
    ("default_us", "override", "timeout_us", "expected_us"),
    [
        (0, True, 5, 0),
        (1000, False, 5, 1000),
        (1000, True, 0, 1000),
        (1000, True, 5, 5),
        (1000, True, 999, 999),
        (1000, True, 1000, 1000),
        (1000, True, 5000, 1000),
        (0, False, 0, 0),
    ],
)
def test_a_request_can_only_shorten_the_timeout_and_only_if_allowed(
    default_us: int, override: bool, timeout_us: int, expected_us: int
) -> None:
    policy = QueuePolicy(default_timeout_microseconds=default_us, allow_timeout_override=override)
    deadline_ns = rules(policy).deadline_ns(0, timeout_us, now_ns=7)
    assert deadline_ns == (7 + expected_us * NS_PER_US if expected_us else 0)


def test_nobody_is_delayed_where_responses_keep_their_order() -> None:
    assert rules(DELAY, preserve_ordering=True).deadline_ns(0, 0, now_ns=7) == 0
    assert rules(REJECT, preserve_ordering=True).deadline_ns(0, 0, now_ns=7) > 0
    assert rules(DELAY).deadline_ns(0, 0, now_ns=7) > 0


def test_a_level_has_its_own_policy_or_the_default() -> None:
    found = rules(
        QueuePolicy(max_queue_size=5),
        priority_levels=2,
        default_priority_level=1,
        priority_queue_policy={
            2: QueuePolicy(max_queue_size=1, timeout_action=TimeoutAction.DELAY)
        },
    )
    assert [found.limit(level) for level in (1, 2)] == [5, 1]
    assert [found.rejects(level) for level in (1, 2)] == [True, False]


def test_level_one_goes_first_and_a_level_is_first_in_first_out() -> None:
    order = [("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 3)]
    queue = queue_of(*(waiting(name, level=level) for name, level in order), levels=3)
    assert names(queue) == ["b", "d", "a", "c", "e"]
    assert (len(queue), queue.rows) == (5, 5)


def test_a_request_leaves_from_any_place() -> None:
    members = [waiting(name, rows=2) for name in "abc"]
    queue = queue_of(*members)
    queue.remove([members[1]])
    queue.remove([members[1]])
    assert names(queue) == ["a", "c"]
    assert (len(queue), queue.rows) == (2, 4)


def test_a_level_is_full_at_its_limit_and_not_one_before() -> None:
    queue = queue_of(waiting("a"), policy=QueuePolicy(max_queue_size=2))
    assert not queue.full(0)
    second = waiting("b")
    queue.push(second)
    assert queue.full(0)
    queue.remove([second])
    assert not queue.full(0)


def test_levels_are_full_each_for_itself() -> None:
    queue = queue_of(waiting("a", level=1), policy=QueuePolicy(max_queue_size=1), levels=2)
    assert queue.full(1)
    assert not queue.full(2)


def test_a_queue_without_a_limit_is_never_full() -> None:
    assert not queue_of(*(waiting() for _ in range(1000))).full(0)


def test_what_waited_too_long_is_rejected_at_its_deadline_and_not_before() -> None:
    members = [waiting("a", deadline_ns=10), waiting("b", deadline_ns=20), waiting("c")]
    queue = queue_of(*members, policy=REJECT)
    assert queue.expire(9) == []
    assert names(queue.expire(10)) == ["a"]
    assert names(queue) == ["b", "c"]
    assert names(queue.expire(99)) == ["b"]
    assert names(queue) == ["c"]


def test_what_waited_too_long_is_delayed_behind_its_level_but_before_the_next() -> None:
    members = [
        waiting("a", level=1, deadline_ns=10),
        waiting("b", level=1, deadline_ns=10),
        waiting("c", level=1, deadline_ns=50),
        waiting("d", level=2, deadline_ns=50),
    ]
    queue = queue_of(*members, policy=DELAY, levels=2)
    assert queue.expire(20) == []
    assert names(queue) == ["c", "a", "b", "d"]
    queue.remove([members[0]])
    assert names(queue) == ["c", "b", "d"]
    assert len(queue) == 3


def test_the_nearest_deadline_is_that_of_somebody_who_still_waits() -> None:
    early, late = waiting("a", deadline_ns=10), waiting("b", deadline_ns=20)
    queue = queue_of(late, early, policy=REJECT)
    assert queue.nearest_deadline_ns == 10
    queue.remove([early])
    assert queue.nearest_deadline_ns == 20
    queue.remove([late])
    assert queue.nearest_deadline_ns == 0


def test_a_client_that_names_many_levels_leaves_nothing_behind() -> None:
    queue = queue_of(levels=10**9)
    for level in range(1, 5000):
        each = waiting(level=level)
        queue.push(each)
        queue.remove([each])
    last = waiting("last", level=10**9)
    queue.push(last)
    assert names(queue) == ["last"]


def test_nobody_is_lost_and_nobody_comes_twice() -> None:
    choice = random.Random(5)
    queue = queue_of(policy=REJECT, levels=3)
    pushed: list[Waiting] = []
    gone: list[Waiting] = []
    for now in range(3000):
        if choice.random() < 0.6:
            deadline_ns = choice.choice([0, now + choice.randint(1, 40)])
            pushed.append(waiting(level=choice.randint(1, 3), deadline_ns=deadline_ns))
            queue.push(pushed[-1])
        if choice.random() < 0.5 and len(queue):
            leaving = choice.choice(list(queue))
            queue.remove([leaving])
            gone.append(leaving)
        gone += queue.expire(now)
        assert all(each.deadline_ns == 0 or each.deadline_ns > now for each in queue)
    assert Counter(map(id, pushed)) == Counter(map(id, [*gone, *queue]))
    assert len(queue) == sum(each.queued for each in pushed)
    assert queue.rows == len(queue)
