"""Builders for tests of the sequence batcher: configs, requests of sequences, executions."""

from dataclasses import replace

import pytest

from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.config.scheduling import (
    Control,
    ControlInput,
    ControlKind,
    SequenceBatching,
    StrategyDirect,
    StrategyOldest,
)
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from gateway.schedulers.execution import Entry
from gateway.tensor import NUMPY_TYPES
from tests.builders import (
    TEXT,
    Execution,
    read_all,
    soon,
)
from tests.gateway.schedulers.queues import Queue, word

HOUR_US = 3_600_000_000


def direct(
    slots: int = 4, delay_us: int = 0, utilization: float = 0, **fields: object
) -> ModelConfig:
    """A config with the direct strategy."""
    strategy = StrategyDirect(
        max_queue_delay_microseconds=delay_us, minimum_slot_utilization=utilization
    )
    return batched(slots, direct=strategy, **fields)


def oldest(candidates: int = 4, max_batch_size: int = 4, **fields: object) -> ModelConfig:
    """A config with the oldest strategy; fields are those of the strategy, or of the batcher."""
    own = {name: fields.pop(name) for name in tuple(fields) if hasattr(StrategyOldest, name)}
    strategy = replace(StrategyOldest(max_candidate_sequences=candidates), **own)  # type: ignore[arg-type]  # by its field names
    return batched(max_batch_size, oldest=strategy, **fields)


def batched(max_batch_size: int, **fields: object) -> ModelConfig:
    """A config with a sequence batcher."""
    fields = {"max_sequence_idle_microseconds": HOUR_US, **fields}
    batching = replace(SequenceBatching(), **fields)  # type: ignore[arg-type]  # by its field names
    return replace(TEXT, max_batch_size=max_batch_size, sequence_batching=batching)


def part(sequence: int | str, text: str, flags: str = "", **fields: object) -> InferRequest:
    """A request of a sequence; flags are "start", "end", or both."""
    tag = SequenceTag(sequence, start="start" in flags, end="end" in flags)
    return word(text, sequence=tag, **fields)


def ask(queue: Queue, sequence: int | str, text: str, flags: str = "", **fields: object) -> Entry:
    """Submit a request of a sequence, if it is admitted."""
    return queue.ask(part(sequence, text, flags, **fields))


def rows(execution: Execution) -> list[str]:
    """The text of each row of an execution; "-" stands for one without a request."""
    return [
        request.inputs[0].elements()[0].decode()
        if request.sequence and request.sequence.correlation_id
        else "-"
        for request in execution.requests
    ]


def control(request: InferRequest, name: str) -> object:
    """The one value of a control tensor."""
    tensor = request.input(name)
    assert tensor is not None
    if tensor.datatype in NUMPY_TYPES:
        return tensor.array().item()
    return tensor.elements()[0].decode()


BROKEN = InferenceError(Code.UNAVAILABLE, "broken")


SOON_US = 30_000


EITHER = {"direct": direct(), "oldest": oldest()}


CONTROLS = (
    ControlInput(
        name="START",
        control=(Control(kind=ControlKind.CONTROL_SEQUENCE_START, int32_false_true=(0, 1)),),
    ),
    ControlInput(
        name="END",
        control=(Control(kind=ControlKind.CONTROL_SEQUENCE_END, fp32_false_true=(0.0, 1.0)),),
    ),
    ControlInput(
        name="READY",
        control=(Control(kind=ControlKind.CONTROL_SEQUENCE_READY, bool_false_true=(False, True)),),
    ),
    ControlInput(
        name="ID",
        control=(
            Control(kind=ControlKind.CONTROL_SEQUENCE_CORRID, data_type=DataType.TYPE_UINT64),
        ),
    ),
)


async def answer(entry: Entry) -> list[str]:
    return await soon(read_all(entry.stream))


async def refusal(entry: Entry) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        await answer(entry)
    return caught.value.code, caught.value.message


def told(execution: Execution, row: int) -> list[object]:
    request = execution.requests[row]
    return [control(request, name) for name in ("START", "END", "READY", "ID")]
