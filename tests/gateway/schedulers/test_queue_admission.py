"""What a request brings with it to the queue."""

from dataclasses import replace

import pytest

from gateway.batches.padding import Padding
from gateway.config.scheduling import DynamicBatching, QueuePolicy
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.queue import Arrivals, QueueRules
from gateway.tensor import Datatype, Tensor
from tests.builders import new_entry
from tests.gateway.schedulers.queues import TOKENS, dynamic, sentence, word

BATCHING = DynamicBatching(
    priority_levels=3,
    default_priority_level=2,
    default_queue_policy=QueuePolicy(default_timeout_microseconds=7),
)


def arrivals() -> Arrivals:
    return Arrivals(TOKENS, QueueRules(BATCHING), Padding.read(TOKENS))


def test_level_deadline_rows_and_length_come_from_the_request() -> None:
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
    found = Arrivals(dynamic(), QueueRules(BATCHING), Padding())
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
    found = Arrivals(LIMITED, QueueRules(BATCHING), Padding.read(LIMITED))
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
    Arrivals(LIMITED, QueueRules(BATCHING), Padding.read(LIMITED)).check(sentence(length))


@pytest.mark.parametrize("length", [0, 10_000])
def test_without_a_limit_the_model_decides_about_lengths(length: int) -> None:
    arrivals().check(sentence(length))
