"""Priorities, timeouts and limits of the queue, with times passed in."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.batches.padding import Padding
from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching, QueuePolicy, TimeoutAction
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.queue import (
    NS_PER_US,
    Compatibility,
    QueueAdmission,
    QueuedRequest,
    QueueRules,
    RequestQueue,
)
from gateway.tensor import Datatype, Tensor
from tests.builders import new_entry
from tests.gateway.schedulers.queues import TOKENS, dynamic, names, sentence, waiting, word

REJECT = QueuePolicy(default_timeout_microseconds=1000)
DELAY = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_microseconds=1000)


def rules(policy: QueuePolicy | None = None, **fields: object) -> QueueRules:
    return QueueRules(DynamicBatching(default_queue_policy=policy, **fields))  # type: ignore[arg-type]


def queue_of(
    *members: QueuedRequest, policy: QueuePolicy | None = None, levels: int = 0
) -> RequestQueue:
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


def test_no_request_is_delayed_with_preserve_ordering() -> None:
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


def test_level_one_executes_first_and_a_level_is_first_in_first_out() -> None:
    order = [("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 3)]
    queue = queue_of(*(waiting(name, level=level) for name, level in order), levels=3)
    assert names(queue) == ["b", "d", "a", "c", "e"]
    assert (len(queue), queue.rows) == (5, 5)


def test_a_request_is_removed_from_any_place() -> None:
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


def test_an_expired_request_is_rejected_at_its_deadline_and_not_before() -> None:
    members = [waiting("a", deadline_ns=10), waiting("b", deadline_ns=20), waiting("c")]
    queue = queue_of(*members, policy=REJECT)
    assert queue.expire(9) == []
    assert names(queue.expire(10)) == ["a"]
    assert names(queue) == ["b", "c"]
    assert names(queue.expire(99)) == ["b"]
    assert names(queue) == ["c"]


def test_an_expired_request_is_delayed_behind_its_level_but_before_the_next() -> None:
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


def test_the_nearest_deadline_is_that_of_a_queued_request() -> None:
    early, late = waiting("a", deadline_ns=10), waiting("b", deadline_ns=20)
    queue = queue_of(late, early, policy=REJECT)
    assert queue.nearest_deadline_ns == 10
    queue.remove([early])
    assert queue.nearest_deadline_ns == 20
    queue.remove([late])
    assert queue.nearest_deadline_ns == 0


def test_empty_levels_are_deleted_after_a_client_named_many() -> None:
    queue = queue_of(levels=10**9)
    for level in range(1, 5000):
        each = waiting(level=level)
        queue.push(each)
        queue.remove([each])
    last = waiting("last", level=10**9)
    queue.push(last)
    assert names(queue) == ["last"]


def test_every_request_leaves_the_queue_exactly_once() -> None:
    choice = random.Random(5)
    queue = queue_of(policy=REJECT, levels=3)
    pushed: list[QueuedRequest] = []
    gone: list[QueuedRequest] = []
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


BATCHING = DynamicBatching(
    priority_levels=3,
    default_priority_level=2,
    default_queue_policy=QueuePolicy(default_timeout_microseconds=7),
)


def arrivals() -> QueueAdmission:
    return QueueAdmission(TOKENS, QueueRules(BATCHING), Padding.read(TOKENS))


def test_level_deadline_rows_and_length_are_those_of_the_request() -> None:
    request = sentence(12, rows=3, priority=1)
    found = arrivals().waiting(new_entry(ModelStatistics(), request, batch_size=3), now_ns=5000)
    assert (found.level, found.rows, found.length) == (1, 3, 12)
    assert (found.arrived_ns, found.deadline_ns) == (5000, 12000)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_request_has_at_least_one_row(rows: int) -> None:
    entry = new_entry(ModelStatistics(), sentence(4, rows=rows), batch_size=rows)
    assert arrivals().waiting(entry, 0).rows == 1


def test_an_empty_sequence_counts_as_one_token() -> None:
    assert arrivals().waiting(new_entry(ModelStatistics(), sentence(0)), 0).length == 1


def test_without_padded_inputs_there_is_no_length() -> None:
    found = QueueAdmission(dynamic(), QueueRules(BATCHING), Padding())
    found.check(word("a"))
    assert found.waiting(new_entry(ModelStatistics(), word("a")), 0).length == 1


def test_padded_inputs_of_one_request_must_have_one_length() -> None:
    found = arrivals()
    found.check(sentence(4))
    with pytest.raises(InferenceError) as caught:
        found.check(sentence(4, mask=5, id="seven"))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "[request id: seven] padded inputs of model 'tokens' must have the same length in "
        "dimension 1: 'ids' has 4, 'mask' has 5"
    )


LIMITED = replace(TOKENS, parameters={**TOKENS.parameters, "max_padded_length": "5"})


@pytest.mark.parametrize("length", [0, 6, 2**40])
def test_a_length_that_the_model_does_not_take_is_refused(length: int) -> None:
    found = QueueAdmission(LIMITED, QueueRules(BATCHING), Padding.read(LIMITED))
    tensors = [Tensor(name, Datatype.INT64, (1, length), b"") for name in ("ids", "mask")]
    request = InferRequest(model="tokens", inputs=tuple(tensors), id="seven")
    with pytest.raises(InferenceError) as caught:
        found.check(request)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        f"[request id: seven] padded input 'ids' of model 'tokens' has length {length} in "
        "dimension 1, expected 1 to 5, its parameter 'max_padded_length'"
    )


@pytest.mark.parametrize("length", [1, 5])
def test_every_length_up_to_the_limit_is_fine(length: int) -> None:
    QueueAdmission(LIMITED, QueueRules(BATCHING), Padding.read(LIMITED)).check(sentence(length))


@pytest.mark.parametrize("length", [0, 10_000])
def test_without_a_limit_the_model_decides_about_lengths(length: int) -> None:
    arrivals().check(sentence(length))


def model_input(name: str, *dims: int, **fields: bool) -> ModelInput:
    return ModelInput(name=name, data_type=DataType.TYPE_INT8, dims=dims, **fields)  # type: ignore[arg-type]


def compatibility(*inputs: ModelInput, padded: Sequence[str] = ()) -> Compatibility:
    return Compatibility(
        ModelConfig(max_batch_size=8, input=inputs), Padding(dict.fromkeys(padded, 0.0))
    )


def request(data: bytes = b"", **shapes: tuple[int, ...]) -> InferRequest:
    inputs = tuple(Tensor(name, Datatype.INT8, shape, data) for name, shape in shapes.items())
    return InferRequest(model="m", inputs=inputs)


def test_fixed_shapes_are_compatible_with_any_batch_size() -> None:
    found = compatibility(model_input("a", 4), model_input("b", 2, 2))
    assert found.uniform
    first, second = request(a=(1, 4), b=(1, 2, 2)), request(a=(3, 4), b=(3, 2, 2))
    assert found.key(first) == found.key(second)


def test_variable_inputs_need_items_of_one_shape() -> None:
    found = compatibility(model_input("a", -1, 2), model_input("b", 4))
    assert not found.uniform
    assert found.key(request(a=(1, 3, 2), b=(1, 4))) == found.key(request(a=(2, 3, 2), b=(2, 4)))
    assert found.key(request(a=(1, 3, 2), b=(1, 4))) != found.key(request(a=(1, 5, 2), b=(1, 4)))


def test_the_order_of_the_inputs_does_not_matter() -> None:
    found = compatibility(model_input("a", -1), model_input("b", -1))
    assert found.key(request(a=(1, 3), b=(1, 4))) == found.key(request(b=(1, 4), a=(1, 3)))
    assert found.key(request(a=(1, 3), b=(1, 4))) != found.key(request(a=(1, 4), b=(1, 3)))


def test_ragged_inputs_are_not_compared() -> None:
    found = compatibility(model_input("a", -1, allow_ragged_batch=True))
    assert found.key(request(a=(1, 3))) == found.key(request(a=(1, 9)))


def test_padded_inputs_may_differ_in_length_and_in_nothing_else() -> None:
    found = compatibility(model_input("a", -1, -1), padded=["a"])
    assert found.key(request(a=(1, 3, 2))) == found.key(request(a=(1, 9, 2)))
    assert found.key(request(a=(1, 3, 2))) != found.key(request(a=(1, 3, 4)))
    assert compatibility(model_input("a", -1, 4), padded=["a"]).uniform


def test_optional_inputs_must_be_the_same_ones() -> None:
    found = compatibility(model_input("a", 1), model_input("b", 1, optional=True))
    assert found.key(request(a=(1, 1))) == found.key(request(a=(2, 1)))
    assert found.key(request(a=(1, 1))) != found.key(request(a=(1, 1), b=(1, 1)))


def test_shape_tensors_must_be_equal() -> None:
    found = compatibility(model_input("a", 2, is_shape_tensor=True))
    assert found.key(request(b"\1\2", a=(1, 2))) == found.key(request(b"\1\2", a=(1, 2)))
    assert found.key(request(b"\1\2", a=(1, 2))) != found.key(request(b"\1\3", a=(1, 2)))
