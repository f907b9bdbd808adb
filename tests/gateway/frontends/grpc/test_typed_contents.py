"""Large typed contents, read without protobuf."""

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from gateway.config.pbtxt import parse
from gateway.frontends.grpc.parameters import HeaderForwarding
from gateway.frontends.grpc.protobuf_wire import parse_large, parse_request
from gateway.frontends.grpc.request import RequestDecoder
from gateway.frontends.grpc.typed_contents import read_contents
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory

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
def test_what_is_no_contents_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        read_contents(memoryview(data))
