"""Memoized messages give the same requests as newly parsed ones."""

import random
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from gateway.config import ModelConfig
from gateway.frontends.grpc.message_memo import MessageMemo
from gateway.frontends.grpc.parameters import HeaderForwarding
from gateway.frontends.grpc.protobuf_wire import LARGE_BYTES, parse_request
from gateway.frontends.grpc.request import RequestDecoder
from gateway.messages import InferRequest
from gateway.processes.request_terms import TraceParent
from gateway.protos import grpc_service_pb2 as pb
from gateway.request_memo import MOST_BYTES, MOST_KNOWN
from gateway.shared_memory.regions import SharedMemory

CONFIG = ModelConfig(name="m")


@pytest.fixture
def known() -> MessageMemo:
    return MessageMemo()


def message(*sizes: int, fill: int = 1, **fields: Any) -> pb.ModelInferRequest:
    """A message with raw contents of these sizes."""
    made = pb.ModelInferRequest(model_name="m", **fields)
    for number, size in enumerate(sizes):
        made.inputs.add(name=f"x{number}", datatype="UINT8", shape=[size])
        made.raw_input_contents.append(bytes([fill]) * size)
    return made


def decoded(data: bytes) -> InferRequest:
    decoder = RequestDecoder(SharedMemory(), HeaderForwarding(""), ())
    return decoder.decode(*parse_request(data), CONFIG)


def taught(known: MessageMemo, made: pb.ModelInferRequest | bytes) -> None:
    """The message comes for the first and the second time."""
    data = made if isinstance(made, bytes) else made.SerializeToString()
    for _ in range(2):
        incoming = known.parse(data)
        if incoming.known is None:
            known.add(incoming, decoded(data))


def timeless(request: InferRequest) -> InferRequest:
    return replace(request, received_ns=0)


def meaning(known: MessageMemo, made: pb.ModelInferRequest | bytes) -> InferRequest | None:
    data = made if isinstance(made, bytes) else made.SerializeToString()
    incoming = known.parse(data)
    return None if incoming.known is None else timeless(incoming.known.request(data))


def test_only_its_data_may_change(known: MessageMemo) -> None:
    taught(known, message(4, 300, fill=1))
    again = message(4, 300, fill=2)
    found = meaning(known, again)
    assert found == timeless(decoded(again.SerializeToString()))
    assert found is not None
    assert [bytes(each.raw()) for each in found.inputs] == [bytes([2]) * 4, bytes([2]) * 300]


def test_a_message_is_not_added_at_its_first_arrival(known: MessageMemo) -> None:
    data = message(4).SerializeToString()
    known.add(known.parse(data), decoded(data))
    assert known.parse(data).known is None


def test_a_known_message_has_a_new_receive_time(known: MessageMemo) -> None:
    data = message(4).SerializeToString()
    first = decoded(data)
    taught(known, data)
    again = known.parse(data).known
    assert again is not None
    assert again.request(data).received_ns > first.received_ns


def test_the_trace_of_a_request_is_not_kept(known: MessageMemo) -> None:
    data = message(4).SerializeToString()
    for _ in range(2):
        request = replace(decoded(data), trace=TraceParent("00-1-2-01"))
        known.add(known.parse(data), request)
    again = known.parse(data).known
    assert again is not None
    assert again.asked.trace is None
    assert again.request(data).trace is None


@pytest.mark.parametrize(
    "other",
    [
        message(5, 3),  # as long in all
        message(3, 5),
        message(8),
        message(4, 4, model_version="1"),
        message(4, 4, id="7"),
        pb.ModelInferRequest(model_name="n", inputs=message(4, 4).inputs),
    ],
)
def test_another_message_is_read(known: MessageMemo, other: pb.ModelInferRequest) -> None:
    taught(known, message(4, 4))
    assert meaning(known, other) is None


def with_parameter(name: str, **value: Any) -> pb.ModelInferRequest:
    made = message(4)
    made.parameters[name].CopyFrom(pb.InferParameter(**value))
    return made


def test_parameters_and_outputs_are_part_of_what_is_known(known: MessageMemo) -> None:
    made = with_parameter("temperature", double_param=0.5)
    made.parameters["priority"].uint64_param = 3
    made.parameters["timeout"].int64_param = 9
    output = made.outputs.add(name="y")
    output.parameters["classification"].int64_param = 3
    taught(known, made)
    found = meaning(known, made)
    assert found == timeless(decoded(made.SerializeToString()))
    assert found is not None
    assert (found.priority, found.timeout_us, found.outputs[0].classes) == (3, 9, 3)


def with_text() -> pb.ModelInferRequest:
    made = message()
    made.inputs.add(name="x", datatype="BYTES", shape=[1])
    made.raw_input_contents.append(b"\1\0\0\0a")
    return made


def with_input_parameter() -> pb.ModelInferRequest:
    made = message(4)
    made.inputs.add(name="z", datatype="UINT8", shape=[4])
    made.inputs[1].parameters["unknown"].int64_param = 4
    made.raw_input_contents.append(b"abcd")
    return made


@pytest.mark.parametrize(
    "made",
    [
        message(4, id="7"),
        with_parameter("sequence_id", int64_param=7),
        message(),
        message(LARGE_BYTES),
        message(4, model_version="1" * MOST_BYTES),
        with_input_parameter(),
        with_text(),
    ],
    ids=["id", "sequence", "nothing raw", "large", "long", "parameters of an input", "text"],
)
def test_changing_or_long_messages_are_not_added(
    known: MessageMemo, made: pb.ModelInferRequest
) -> None:
    taught(known, made)
    assert meaning(known, made) is None


def test_raw_contents_elsewhere_in_a_message_are_not_memoized(known: MessageMemo) -> None:
    """An unknown field at the end may look as raw contents do."""
    plain = message(4)
    raw = plain.raw_input_contents[0]
    tail = bytes([7 << 3 | 2, 4]) + raw
    odd = plain.SerializeToString() + bytes([30 << 3 & 0x7F | 2 | 0x80, 30 >> 4, len(tail)]) + tail
    assert list(parse_request(odd)[0].raw_input_contents) == [raw]
    taught(known, odd)
    assert meaning(known, odd) is None


@pytest.mark.parametrize(
    "more",
    [
        pb.ModelInferRequest(id="abc").SerializeToString(),
        pb.ModelInferRequest(
            parameters={"sequence_id": pb.InferParameter(int64_param=7)}
        ).SerializeToString(),
        message(3).SerializeToString()[-5:],
    ],
    ids=["id", "parameter", "more raw contents"],
)
def test_fields_after_the_raw_contents_are_parsed(known: MessageMemo, more: bytes) -> None:
    """Also if another message of that length, with as much before its contents, is known."""
    short = pb.ModelInferRequest(model_name="n", inputs=message(4).inputs)
    short.raw_input_contents.append(bytes(4))
    taught(known, message(4 + len(more)))
    taught(known, short)
    assert meaning(known, short) is not None
    assert meaning(known, short.SerializeToString() + more) is None


def test_entries_of_one_length_have_the_header_length_of_the_first(known: MessageMemo) -> None:
    first, other = message(9), message(4, model_version="123")
    assert len(first.SerializeToString()) == len(other.SerializeToString())
    for _ in range(3):
        taught(known, first)
        taught(known, other)
    assert meaning(known, first) is not None
    assert meaning(known, other) is None


def test_bytes_that_are_not_a_message_are_refused(known: MessageMemo) -> None:
    with pytest.raises(DecodeError):
        known.parse(b"\xff\xff\xff")


def test_the_memo_is_bounded(known: MessageMemo) -> None:
    for number in range(2 * MOST_KNOWN):
        taught(known, message(4, model_version=str(10_000 + number)))
    assert meaning(known, message(4, model_version=str(10_000 + 2 * MOST_KNOWN - 1))) is not None
    assert meaning(known, message(4, model_version="10000")) is None
    assert len(known._known) == MOST_KNOWN  # noqa: SLF001 - that is what is bounded


def test_the_memo_never_changes_the_request_of_a_message(known: MessageMemo) -> None:
    chance = random.Random(11)
    for _ in range(3000):
        sizes = [chance.choice((0, 1, 4, 127, 128, 200)) for _ in range(chance.randint(0, 3))]
        made = message(*sizes, fill=chance.randrange(256))
        if chance.random() < 0.2:
            made.model_version = str(chance.randint(1, 3))
        if chance.random() < 0.2:
            made.outputs.add(name=chance.choice("yz"))
        if chance.random() < 0.1:
            made.id = str(chance.randint(1, 3))
        data = made.SerializeToString()
        expected, incoming = decoded(data), known.parse(data)
        if incoming.known is None:
            known.add(incoming, expected)
        else:
            assert timeless(incoming.known.request(data)) == timeless(expected)
