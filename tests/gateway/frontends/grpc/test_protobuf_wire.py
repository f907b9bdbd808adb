"""Large fields cut out of messages, without a change of the decoded values."""

import random
import time
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from gateway.config.pbtxt import parse
from gateway.frontends.grpc.parameters import HeaderForwarding
from gateway.frontends.grpc.protobuf_wire import (
    LARGE_BYTES,
    MAX_FIELDS,
    SMALL_BYTES,
    parse_head,
    parse_large,
    parse_request,
    read_contents,
    sized,
)
from gateway.frontends.grpc.request import RequestDecoder
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory

RAW = [b"", b"a" * 130, b"b" * LARGE_BYTES, b"c"]


def request(raw: list[bytes], outputs: int = 2) -> pb.ModelInferRequest:
    found = pb.ModelInferRequest(model_name="m", id="7", raw_input_contents=raw)
    found.parameters["p"].int64_param = 5
    for number in range(len(raw)):
        found.inputs.add(name=f"I{number}", datatype="UINT8", shape=[len(raw[number])])
    for number in range(outputs):
        found.outputs.add(name=f"O{number}")
    return found


@pytest.mark.parametrize("raw", [[], [b"small"], RAW, [bytes(2**20)] * 3])
def test_every_parser_gives_the_same_message(raw: list[bytes]) -> None:
    whole = request(raw)
    message, found = parse_request(whole.SerializeToString())
    assert [bytes(each) for each in found] == raw
    del message.raw_input_contents[:]
    del whole.raw_input_contents[:]
    assert message == whole


def test_large_raw_contents_are_views_of_the_message() -> None:
    data = request([bytes(LARGE_BYTES)]).SerializeToString()
    _, (found,) = parse_request(data)
    assert isinstance(found, memoryview)
    assert found.obj is data
    assert found.readonly


def test_messages_with_many_fields_are_parsed_by_protobuf() -> None:
    whole = request([b"a" * LARGE_BYTES], outputs=MAX_FIELDS + 1)
    message, found = parse_request(whole.SerializeToString())
    assert len(message.outputs) == MAX_FIELDS + 1
    assert list(found) == [b"a" * LARGE_BYTES]
    _, found = parse_request(b"\x3a\x00" * LARGE_BYTES)
    assert not isinstance(found, list)
    assert list(found) == [b""] * LARGE_BYTES


def test_an_unknown_field_does_no_harm() -> None:
    data = request([bytes(LARGE_BYTES)]).SerializeToString() + b"\xf8\x07\x01" + b"\xfa\x07\x01x"
    message, found = parse_request(data)
    assert message.model_name == "m"
    assert list(found) == [bytes(LARGE_BYTES)]


@pytest.mark.parametrize("raw", [[], RAW, [bytes(2**20)] * 3])
def test_the_head_of_a_message_is_all_but_its_inputs(raw: list[bytes]) -> None:
    whole = request(raw)
    head = parse_head(whole.SerializeToString())
    del whole.raw_input_contents[:]
    del whole.inputs[:]
    assert head == whole


def test_inputs_that_are_none_do_no_harm_to_the_head() -> None:
    head = parse_head(request([]).SerializeToString() + b"\x2a\x03\xff\xff\xff")
    assert head == request([])


def test_a_head_that_takes_long_is_not_parsed() -> None:
    whole = request([bytes(LARGE_BYTES)])
    whole.parameters["long"].string_param = "x" * SMALL_BYTES
    assert parse_head(whole.SerializeToString()) is None
    many = request([bytes(LARGE_BYTES)], outputs=MAX_FIELDS)
    assert parse_head(many.SerializeToString()) is None
    assert parse_head(request(RAW).SerializeToString()[:-1]) is None
    assert parse_head(b"\x08\x01") is None


@pytest.mark.parametrize("size", [3, LARGE_BYTES])
@pytest.mark.parametrize("junk", [b"\x3a\xff\xff\xff\xff\x7f", b"\x3a", b"\xff" * 20, b"\x0b"])
def test_bytes_that_are_not_a_message_are_refused(size: int, junk: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_request(request([bytes(size)]).SerializeToString() + junk)


@pytest.mark.parametrize("junk", [b"\xff", b"\x3a\x80"])
def test_a_number_without_end_is_refused_at_its_beginning(junk: bytes) -> None:
    began = time.process_time()
    with pytest.raises(DecodeError):
        parse_request(junk + b"\x80" * 2**20)
    assert time.process_time() - began < 5.0


def test_a_message_cut_anywhere_is_parsed_as_protobuf_does() -> None:
    data = request(RAW).SerializeToString()
    chosen = random.Random(0).sample(range(len(data)), 300) + list(range(len(data) - 40, len(data)))
    for end in chosen:
        assert _parsed(data[:end]) == _parsed_by_protobuf(data[:end]), end


def _parsed(data: bytes) -> object:
    try:
        message, raw = parse_request(data)
    except DecodeError:
        return None
    del message.raw_input_contents[:]
    return message.SerializeToString(deterministic=True), [bytes(each) for each in raw]


def _parsed_by_protobuf(data: bytes) -> object:
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return None
    raw = list(message.raw_input_contents)
    del message.raw_input_contents[:]
    return message.SerializeToString(deterministic=True), raw


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 2**14, 2**31])
def test_a_length_is_written_as_protobuf_writes_it(size: int) -> None:
    varint = pb.InferTensorContents(uint64_contents=[size]).SerializeToString()[2:]
    assert sized(b"\x32", size) == b"\x32" + varint


CONFIG = parse('name: "m" backend: "identity"', "m/config.pbtxt")
DECODER = RequestDecoder(SharedMemory(), HeaderForwarding(""), ())
COUNT = 20_000
CHANCE = random.Random(7)
VALUES: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [CHANCE.random() < 0.5 for _ in range(COUNT)]),
    "INT8": ("int_contents", [CHANCE.randrange(-(2**31), 2**31) for _ in range(COUNT)]),
    "INT32": ("int_contents", [CHANCE.choice([-1, 1, 300]) for _ in range(COUNT)]),
    "INT64": ("int64_contents", [CHANCE.randrange(-(2**63), 2**63) for _ in range(COUNT)]),
    "UINT8": ("uint_contents", [CHANCE.randrange(2**32) for _ in range(COUNT)]),
    "UINT64": ("uint64_contents", [CHANCE.randrange(2**64) for _ in range(COUNT)]),
    "FP32": ("fp32_contents", [CHANCE.random() for _ in range(COUNT)]),
    "FP64": ("fp64_contents", [CHANCE.random() for _ in range(COUNT)]),
    "BYTES": ("bytes_contents", [bytes(CHANCE.choice([0, 3, 3, 200])) for _ in range(COUNT)]),
}


@pytest.mark.parametrize("datatype", VALUES)
def test_large_contents_are_those_that_protobuf_reads(datatype: str) -> None:
    field, values = VALUES[datatype]
    asked = pb.ModelInferRequest(model_name="m", id="large")
    for name in ("a", "b"):
        given = asked.inputs.add(name=name, datatype=datatype, shape=[COUNT])
        getattr(given.contents, field).extend(values)
    data = asked.SerializeToString()
    large = parse_large(data)
    found = DECODER.decode(large.message, large.raw, CONFIG, large.contents)
    expected = DECODER.decode(*parse_request(data), CONFIG)
    assert len(large.contents) == 2
    assert [(each.name, bytes(each.raw())) for each in found.inputs] == [
        (each.name, bytes(each.raw())) for each in expected.inputs
    ]


def test_elements_that_are_not_packed_are_read_too() -> None:
    found = read_contents(memoryview(b"\x10\x01" * 3 + b"\x12\x02\x02\x03"))
    assert found.populated == ["int_contents"]
    assert list(memoryview(found.data).cast("B").cast("I")) == [1, 1, 1, 2, 3]


@pytest.mark.parametrize(
    "data", [b"\x12\x05\x01", b"\x32\x03abc", b"\x12\x01\x80", b"\x80", b"\0\0"]
)
def test_invalid_contents_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        read_contents(memoryview(data))
