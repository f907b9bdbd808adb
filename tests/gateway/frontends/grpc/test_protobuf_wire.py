"""Messages in bytes: cut apart without changing what they say."""

import random
import time

import pytest
from google.protobuf.message import DecodeError

from gateway.frontends.grpc.protobuf_wire import LARGE_BYTES, MAX_FIELDS, parse_request, sized
from gateway.protos import grpc_service_pb2 as pb

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
def test_a_message_says_the_same_in_whatever_way_it_is_parsed(raw: list[bytes]) -> None:
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


def test_many_fields_are_left_to_protobuf() -> None:
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


@pytest.mark.parametrize("size", [3, LARGE_BYTES])
@pytest.mark.parametrize("junk", [b"\x3a\xff\xff\xff\xff\x7f", b"\x3a", b"\xff" * 20, b"\x0b"])
def test_what_is_no_message_is_refused(size: int, junk: bytes) -> None:
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
