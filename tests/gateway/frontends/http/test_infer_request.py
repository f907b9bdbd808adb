"""Decoding of infer requests, and every refusal on the way."""

import json
import struct
import time
from typing import Any

import numpy as np
import pytest

from gateway.errors import Code
from gateway.frontends.http.infer_request import InferDecoder, OutputForms, Target
from gateway.tensor import NUMPY_TYPES, Datatype
from tests.gateway.frontends.http.infer_requests import (
    LIMIT,
    MODEL,
    UNSIGNED,
    Regions,
    decode,
    given,
    member,
    refusal,
    request_of,
)

FLOATS = struct.pack("<2f", 1.5, 2.5)


NO_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)


def sized(size: Any, **members: Any) -> dict[str, Any]:
    """One entry of `inputs` with its data behind the JSON."""
    return member(**{"parameters": {"binary_data_size": size}, **members})


# The request as a whole.


def test_a_request_has_its_model_version_and_time() -> None:
    target = Target(MODEL, version="3", received_ns=7)
    decoder = InferDecoder(Regions(), LIMIT)
    request, forms = decoder.decode(target, b'{"inputs":[]}', memoryview(b""))
    assert (request.model, request.version, request.received_ns) == ("m", "3", 7)
    assert (request.id, request.inputs, request.outputs) == ("", (), ())
    assert (request.sequence, request.priority, request.timeout_us) == (None, 0, 0)
    assert dict(request.parameters) == {}
    assert forms == OutputForms()


def test_an_id_is_a_string() -> None:
    assert request_of(id="r1").id == "r1"
    for value in (5, None, True, ["r1"], {}):
        assert refusal({"id": value, "inputs": []}) == (
            Code.INTERNAL,
            "Unable to parse 'id': attempt to access JSON non-string as string",
        )


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": None}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (
            {"inputs": [], "outputs": {}},
            "Unable to parse 'outputs': attempt to access JSON non-array as array",
        ),
        (
            {"inputs": [], "outputs": None},
            "Unable to parse 'outputs': attempt to access JSON non-array as array",
        ),
        (
            {"inputs": [], "parameters": []},
            "failed to get request params.: attempt to get members for non-object",
        ),
        (
            {"inputs": [], "parameters": None},
            "failed to get request params.: attempt to get members for non-object",
        ),
    ],
)
def test_members_have_their_kinds(members: dict[str, Any], message: str) -> None:
    assert refusal(members) == (Code.INTERNAL, message)


def test_unknown_members_are_ignored() -> None:
    found = given(1.0, parameters={"mine": [1]}, colour="red")
    request, _ = decode({"inputs": [found], "more": {"x": None}})
    assert [each.name for each in request.inputs] == ["X"]


def test_the_first_error_decides_the_refusal() -> None:
    bad: dict[str, Any] = {
        "id": 5,
        "parameters": {"triton_x": 1},
        "inputs": [member()],
        "outputs": [{}],
    }
    messages = ["non-string as string", "triton_", "no field is set", "member 'name'"]
    for key, text in zip(tuple(bad), messages, strict=True):
        assert text in refusal(bad)[1]
        bad[key] = {"id": "", "parameters": {}, "inputs": [given(1.0)]}.get(key, [])


# Inputs.


@pytest.mark.parametrize("datatype", NUMPY_TYPES.keys() - {Datatype.FP16})
def test_an_input_may_come_in_json(datatype: Datatype) -> None:
    array = np.array([1, 0, 1], NUMPY_TYPES[datatype])
    found = member(datatype=datatype, shape=[3, 1], data=array.tolist())
    (tensor,) = decode({"inputs": [found]})[0].inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("X", datatype, (3, 1))
    assert tensor.array().tolist() == array.reshape(3, 1).tolist()


@pytest.mark.parametrize(
    "data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2, 3, 4]]], [1, [2, [3, 4]]]]
)
def test_nesting_need_not_match_the_shape(data: list[Any]) -> None:
    (tensor,) = decode({"inputs": [member(shape=[4, 1], data=data)]})[0].inputs
    assert tensor.array().tolist() == [[1], [2], [3], [4]]


def test_binary_inputs_are_views_of_the_body_in_order() -> None:
    body = bytearray(FLOATS + b"\x01\x00\x00\x00a")
    inputs = [sized(8), given(3.0, name="J"), sized(5, name="B", datatype="BYTES", shape=[1])]
    decoder = InferDecoder(Regions(), LIMIT)
    header = json.dumps({"inputs": inputs}).encode()
    request, _ = decoder.decode(Target(MODEL), header, memoryview(body))
    first, middle, last = request.inputs
    assert (first.array().tolist(), middle.array().tolist()) == ([1.5, 2.5], [3.0])
    assert last.elements() == (b"a",)
    body[0:8] = struct.pack("<2f", 7.0, 8.0)
    assert first.array().tolist() == [7.0, 8.0]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_comes_as_binary_only(datatype: str) -> None:
    (tensor,) = decode({"inputs": [sized(4, datatype=datatype)]}, b"\0\x3c\0\x40")[0].inputs
    assert (tensor.datatype, bytes(tensor.raw())) == (datatype, b"\0\x3c\0\x40")
    assert refusal({"inputs": [given(1.0, datatype=datatype)]}) == (
        Code.INVALID_ARG,
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format "
        "for input X",
    )


def test_an_input_may_come_in_shared_memory() -> None:
    where = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 4}
    regions = Regions(r=b"junk" + FLOATS)
    (tensor,) = decode({"inputs": [member(parameters=where)]}, regions=regions)[0].inputs
    assert tensor.array().tolist() == [1.5, 2.5]
    assert refusal({"inputs": [member(parameters=where)]})[0] is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (member(), NO_SOURCE + "no field is set"),
        ("X", NO_SOURCE + "no field is set"),
        (member(parameters="many"), NO_SOURCE + "no field is set"),
        (sized(8, data=[1, 2]), NO_SOURCE + "set 'data' 'binary_data_size'"),
        (
            member(data=[], parameters={"shared_memory_region": "r", "binary_data_size": 0}),
            NO_SOURCE + "set 'data' 'binary_data_size' 'shared_memory_region'",
        ),
    ],
)
def test_the_data_of_an_input_has_one_source(found: Any, message: str) -> None:
    assert refusal({"inputs": [found]}, FLOATS) == (Code.INVALID_ARG, message)


@pytest.mark.parametrize("key", ["name", "datatype", "shape"])
def test_an_input_has_a_name_a_datatype_and_a_shape(key: str) -> None:
    found = {name: value for name, value in given(1.0).items() if name != key}
    assert refusal({"inputs": [found]}) == (
        Code.INTERNAL,
        f"Unable to parse '{key}': attempt to access non-existing object member '{key}'",
    )
    kind = "array as array" if key == "shape" else "string as string"
    assert refusal({"inputs": [{**found, key: 5}]}) == (
        Code.INTERNAL,
        f"Unable to parse '{key}': attempt to access JSON non-{kind}",
    )


@pytest.mark.parametrize("dim", [-1, 2.0, "2", True, None, [2], 2.0**64])
def test_a_dimension_is_a_whole_number(dim: Any) -> None:
    assert refusal({"inputs": [given(1.0, 2.0, shape=[1, dim])]}) == (
        Code.INTERNAL,
        f"Unable to parse 'shape': {UNSIGNED}",
    )


@pytest.mark.parametrize("size", ["8", -8, 8.0, True, None])
def test_a_binary_size_is_a_whole_number(size: Any) -> None:
    assert refusal({"inputs": [sized(size)]}, FLOATS) == (
        Code.INTERNAL,
        f"Unable to parse 'binary_data_size': {UNSIGNED}",
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([12], "unexpected size for input 'X', expecting 4 additional bytes for model 'm'"),
        ([4, 5], "unexpected size for input 'X', expecting 1 additional bytes for model 'm'"),
        (
            [2**63],
            f"unexpected size for input 'X', expecting {2**63 - 8} additional bytes for model 'm'",
        ),
        ([4], "unexpected additional input data for model 'm'"),
        ([], "unexpected additional input data for model 'm'"),
    ],
)
def test_as_many_bytes_come_as_are_announced(sizes: list[int], message: str) -> None:
    assert refusal({"inputs": [sized(size) for size in sizes]}, FLOATS) == (
        Code.INVALID_ARG,
        message,
    )


def test_an_unknown_datatype_is_refused() -> None:
    assert refusal({"inputs": [given(1.0, datatype="STRING")]}) == (
        Code.INVALID_ARG,
        "invalid datatype for input X",
    )
    assert refusal({"inputs": [sized(8, datatype="fp32")], "id": "r"}, FLOATS) == (
        Code.INVALID_ARG,
        "[request id: r] inference input 'X' data-type is '<invalid>', but model 'm' expects "
        "'FP32'",
    )
    assert refusal({"inputs": [sized(8, datatype="fp32", name="W")]}, FLOATS) == (
        Code.INVALID_ARG,
        "unexpected inference input 'W' for model 'm'",
    )


@pytest.mark.parametrize("data", [1.0, "ab", None, {"a": 1}])
def test_data_is_an_array(data: Any) -> None:
    assert refusal({"inputs": [member(data=data)]}) == (
        Code.INTERNAL,
        "Unable to parse 'data': attempt to access JSON non-array as array",
    )


@pytest.mark.parametrize("shape", [[0], [3, 0, 2], [2**62, 2**62, 0]])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
def test_an_empty_tensor_is_not_inspected(shape: list[int], datatype: str) -> None:
    found = member(shape=shape, datatype=datatype, data=[1, "x", {}])
    (tensor,) = decode({"inputs": [found]})[0].inputs
    assert (tensor.shape, tensor.raw()) == (tuple(shape), b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2, 3], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ([1, 2, "x"], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ([1, "x", 3], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ([1], "Failed to parse 'data' field: shape does not match true shape"),
        ([], "Failed to parse 'data' field: shape does not match true shape"),
        ([[]], "Failed to parse 'data' field: shape does not match true shape"),
    ],
)
def test_data_has_as_many_elements_as_the_shape(data: list[Any], message: str) -> None:
    assert refusal({"inputs": [member(data=data)]}) == (Code.INTERNAL, message)


@pytest.mark.parametrize("data", [[], ["a"], ["a", "b", "c"]])
def test_validation_counts_the_strings(data: list[str]) -> None:
    (tensor,) = decode({"inputs": [member(datatype="BYTES", data=data)]})[0].inputs
    assert tensor.elements() == tuple(text.encode() for text in data)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            [2**62, 4],
            "invalid shape for input 'X': shape [4611686018427387904,4] causes total element "
            "count to exceed maximum size of 9223372036854775807",
        ),
        (
            [2**64 - 1],
            "invalid shape for input 'X': shape [18446744073709551615] causes total element "
            "count to exceed maximum size of 9223372036854775807",
        ),
        (
            [2**62],
            "byte size overflow for input 'X': element count (4611686018427387904) * data type "
            "size (4) exceeds maximum allowed size (9223372036854775807)",
        ),
        (
            [251],
            "JSON input 'X' has a byte_size (1004 bytes) that exceeds the maximum allowed value "
            "of 1000 bytes. Use --http-max-input-size to increase the limit.",
        ),
    ],
)
def test_a_shape_cannot_ask_for_more_than_the_limit(shape: list[int], message: str) -> None:
    assert refusal({"inputs": [member(shape=shape, data=[1.0])]}) == (Code.INVALID_ARG, message)


def test_a_shape_of_many_large_dims_is_not_multiplied_out() -> None:
    began = time.process_time()
    code, message = refusal({"inputs": [member(shape=[2**63] * 100_000, data=[1.0])]})
    assert code is Code.INVALID_ARG
    assert message.endswith("element count to exceed maximum size of 9223372036854775807")
    assert time.process_time() - began < 5.0


def test_an_input_in_json_may_reach_the_limit() -> None:
    (tensor,) = decode({"inputs": [given(*[0.0] * 250)]})[0].inputs
    assert len(tensor.raw()) == LIMIT
    text = "x" * (LIMIT - 4)
    decode({"inputs": [given(text, datatype="BYTES")]})
    assert refusal({"inputs": [given(text + "x", datatype="BYTES")]}) == (
        Code.INVALID_ARG,
        "JSON input 'X' has a byte_size (1001 bytes) that exceeds the maximum allowed value of "
        "1000 bytes. Use --http-max-input-size to increase the limit.",
    )


def test_many_shapes_cannot_keep_the_server_busy() -> None:
    found = {"inputs": [given(1.0, name=str(number)) for number in range(100_000)]}
    assert len(decode(found)[0].inputs) == 100_000
