"""Known JSON of a request: decoded as if it were read again."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.frontends.http.infer_request import (
    InferDecoder,
    OutputForms,
    Target,
)
from gateway.messages import InferRequest, SharedRegion
from gateway.request_memo import MOST_BYTES, MOST_KNOWN
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Datatype

LIMIT = 100_000
MODEL = ModelConfig(
    name="m", input=(ModelInput(name="X", data_type=DataType.TYPE_FP32, dims=(-1,)),)
)
OTHER = replace(MODEL, name="other")


class Regions(SharedMemory):
    """One region, which counts its look-ups."""

    def __init__(self) -> None:
        super().__init__()
        self.located = 0

    def locate(self, region: SharedRegion) -> SharedRegion:
        self.located += 1
        return region

    def read(self, region: SharedRegion, datatype: Datatype | None) -> memoryview:
        self.located += 1
        return memoryview(b"1234")


@pytest.fixture
def decoder() -> InferDecoder:
    return InferDecoder(Regions(), LIMIT)


def sized(name: str = "X", size: int = 8, datatype: str = "FP32") -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": name, "shape": [size // 4], "datatype": datatype, "parameters": parameters}


def some_request(chance: random.Random) -> tuple[bytes, int]:
    """The JSON of a good request, and how many bytes come behind it."""
    inputs = [sized(name, 4 * chance.randrange(4)) for name in "XYZ"[: chance.randrange(4)]]
    size = sum(each["parameters"]["binary_data_size"] for each in inputs)
    if chance.random() < 0.2:
        inputs.append({"name": "J", "shape": [2], "datatype": "INT64", "data": [1, 2]})
    found: dict[str, Any] = {"inputs": inputs}
    if chance.random() < 0.5:
        found["id"] = chance.choice(["", "a", "b"])
    if chance.random() < 0.5:
        found["outputs"] = [{"name": "P", "parameters": {"binary_data": chance.random() < 0.5}}]
    if chance.random() < 0.5:
        found["parameters"] = chance.choice(
            [
                {"binary_data_output": True, "priority": 2},
                {"sequence_id": 7, "sequence_start": True, "timeout": 5},
                {"mine": chance.choice(["x", 1, True])},
            ]
        )
    return json.dumps(found).encode(), size


def decoded(
    decoder: InferDecoder, header: bytes, binary: bytes, target: Target | None = None
) -> tuple[InferRequest, OutputForms]:
    return decoder.decode(target or Target(MODEL), header, memoryview(binary))


def test_a_known_request_is_decoded_as_a_new_one(decoder: InferDecoder) -> None:
    chance = random.Random(4)
    for round_number in range(2000):
        header, size = some_request(chance)
        binary = chance.randbytes(size)
        target = Target(chance.choice([MODEL, OTHER]), chance.choice(["", "3"]), (), round_number)
        fresh = decoded(InferDecoder(Regions(), LIMIT), header, binary, target)
        assert decoded(decoder, header, binary, target) == fresh


def test_its_inputs_are_views_of_the_bytes_that_came_with_it(decoder: InferDecoder) -> None:
    header = json.dumps({"inputs": [sized("X"), sized("Y", 4)]}).encode()
    for binary in (b"12345678abcd", b"abcdefgh1234"):
        request, _ = decoded(decoder, header, binary)
        assert [bytes(each.raw()) for each in request.inputs] == [binary[:8], binary[8:]]
        assert isinstance(request.inputs[0].data, memoryview)
        assert request.inputs[0].data.obj is binary


def test_another_number_of_bytes_behind_it_is_refused_as_before(decoder: InferDecoder) -> None:
    header = json.dumps({"inputs": [sized()]}).encode()
    decoded(decoder, header, b"12345678")
    for binary, text in (
        (b"1234567", "unexpected size for input 'X', expecting 1 additional bytes for model 'm'"),
        (b"123456789", "unexpected additional input data for model 'm'"),
    ):
        with pytest.raises(InferenceError) as caught:
            decoded(decoder, header, binary)
        assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, text)


def test_forwarded_headers_are_those_of_each_request(decoder: InferDecoder) -> None:
    header = json.dumps({"inputs": [sized()], "parameters": {"k": 1}}).encode()
    for headers, parameters in (
        ([("tenant", "a")], {"k": 1, "tenant": "a"}),
        ([("k", "header")], {"k": "header"}),
        ([], {"k": 1}),
    ):
        request, _ = decoded(decoder, header, b"12345678", Target(MODEL, headers=headers))
        assert request.parameters == parameters
    with pytest.raises(InferenceError, match="reserved"):
        decoded(decoder, header, b"12345678", Target(MODEL, headers=[("triton_x", "1")]))


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_shared_memory_is_looked_up_each_time(part: str) -> None:
    regions = Regions()
    decoder = InferDecoder(regions, LIMIT)
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    named = {"name": "Q", "shape": [1], "datatype": "FP32", "parameters": region}
    found = {"inputs": [sized()], "outputs": [{"name": "P"}]}
    found[part] = [*found[part], named]
    for times in (1, 2, 3):
        decoded(decoder, json.dumps(found).encode(), b"12345678")
        assert regions.located == times


def test_more_than_are_kept_are_decoded_all_the_same(decoder: InferDecoder) -> None:
    for _ in range(2):
        for number in range(MOST_KNOWN + 3):
            header = json.dumps({"id": str(number), "inputs": [sized()]}).encode()
            assert decoded(decoder, header, b"12345678")[0].id == str(number)


def test_json_that_is_too_long_to_be_kept_is_read_each_time(decoder: InferDecoder) -> None:
    header = json.dumps({"id": "i" * MOST_BYTES, "inputs": [sized()]}).encode()
    first, again = (decoded(decoder, header, b"12345678")[0] for _ in range(2))
    assert first == again
    # What is kept is the same object; what is read is made anew.
    assert first.id is not again.id


def test_a_kept_request_is_not_decoded_again(decoder: InferDecoder) -> None:
    header = json.dumps({"id": "i" * (MOST_BYTES // 2), "inputs": [sized()]}).encode()
    first, again = (decoded(decoder, header, b"12345678")[0] for _ in range(2))
    assert first.id is again.id
