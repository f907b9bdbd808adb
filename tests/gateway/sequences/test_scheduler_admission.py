from dataclasses import replace

import pytest

from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlInput, ControlKind
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from gateway.sequences.scheduler import SequenceAdmission
from tests.gateway.schedulers.queues import word
from tests.gateway.sequences.parts import direct, part

NO_ID = "inference request to model 'text' must specify a non-zero or non-empty correlation ID"
NO_START = (
    "inference request for sequence {} to model 'text' must specify the START flag on the first "
    "request of the sequence"
)
BATCH = (
    "inference request to model 'text' must specify batch-size 1 due to requirements of sequence "
    "batcher"
)


def identified(data_type: DataType) -> ModelConfig:
    control = Control(kind=ControlKind.CONTROL_SEQUENCE_CORRID, data_type=data_type)
    return direct(control_input=(ControlInput(name="ID", control=(control,)),))


def check(request: InferRequest, config: ModelConfig | None = None, known: object = 5) -> None:
    def continues(found: InferRequest) -> bool:
        return found.sequence is not None and found.sequence.key == known

    SequenceAdmission(config or direct(), continues).check(request)


def refusal(request: InferRequest, config: ModelConfig | None = None) -> str:
    with pytest.raises(InferenceError) as caught:
        check(request, config)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (word("a", id="r"), NO_ID),
        (word("a", sequence=SequenceTag(0, start=True)), NO_ID),
        (word("a", sequence=SequenceTag("", start=True)), NO_ID),
        (part(6, "a"), NO_START.format(6)),
        (part(6, "a", "end"), NO_START.format(6)),
        (part("6", "a"), NO_START.format(6)),
        (part("5", "a"), NO_START.format(5)),
    ],
)
def test_a_request_without_a_sequence_is_refused(request_: InferRequest, message: str) -> None:
    assert refusal(request_) == message


@pytest.mark.parametrize("request_", [part(5, "a"), part(6, "a", "start"), part("6", "a", "start")])
def test_a_request_of_a_sequence_is_admitted(request_: InferRequest) -> None:
    check(request_)


def test_a_request_has_one_row() -> None:
    two = word("a")
    two = replace(two, inputs=(replace(two.inputs[0], shape=(2, 1), data=(b"a", b"b")),))
    assert refusal(two) == BATCH
    assert refusal(replace(two, sequence=SequenceTag(5, start=True))) == BATCH
    unbatched = direct(slots=0)
    check(replace(two, sequence=SequenceTag(5)), unbatched)


@pytest.mark.parametrize(
    ("correlation_id", "found", "expected", "data_type"),
    [
        ("x", "BYTES", "UINT64", DataType.TYPE_UINT64),
        ("5", "BYTES", "INT32", DataType.TYPE_INT32),
        (5, "UINT64", "BYTES", DataType.TYPE_STRING),
    ],
)
def test_an_id_has_the_type_of_its_control_input(
    correlation_id: int | str, found: str, expected: str, data_type: DataType
) -> None:
    assert refusal(part(correlation_id, "a", "start", id="r"), identified(data_type)) == (
        f"[request id: r] sequence batching control 'ID' data-type is '{found}', but model 'text' "
        f"expects '{expected}'"
    )


def test_iterative_sequences_need_no_id() -> None:
    iterative = direct(iterative_sequence=True)
    check(word("a"), iterative)
    check(word("a", sequence=SequenceTag(0)), iterative)
    check(part(6, "a", "start"), iterative)
    assert refusal(part(6, "a"), iterative) == NO_START.format(6)
