"""Decoding of infer requests, and every refusal on the way."""

import json
import struct
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.frontends.http.infer_request import InferDecoder, OutputForms, Target
from gateway.messages import InferRequest, RequestedOutput, SequenceTag, SharedRegion
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import NUMPY_TYPES, Datatype

LIMIT = 1000
FLOATS = struct.pack("<2f", 1.5, 2.5)
NO_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
MODEL = ModelConfig(
    name="m",
    input=(
        ModelInput(name="X", data_type=DataType.TYPE_FP32, dims=(-1,)),
        ModelInput(name="Z", data_type=DataType.TYPE_FP32, dims=(-1,), optional=True),
    ),
)


class Regions(SharedMemory):
    """Shared memory of which a test says what is in it."""

    def __init__(self, **regions: bytes) -> None:
        super().__init__()
        self.regions = regions

    def locate(self, region: SharedRegion) -> SharedRegion:
        if region.name in self.regions:
            return region
        raise InferenceError(
            Code.NOT_FOUND, f"Unable to find shared memory region: '{region.name}'"
        )

    def read(self, region: SharedRegion, datatype: Datatype | None) -> memoryview:
        data = self.regions[self.locate(region).name]
        return memoryview(data)[region.offset : region.offset + region.byte_size]


def member(name: str = "X", datatype: str = "FP32", **members: Any) -> dict[str, Any]:
    """One entry of `inputs`."""
    return {"name": name, "datatype": datatype, "shape": [2], **members}


def given(*values: Any, **members: Any) -> dict[str, Any]:
    """One entry of `inputs` with its data in JSON."""
    return member(**{"data": list(values), "shape": [len(values)], **members})


def sized(size: Any, **members: Any) -> dict[str, Any]:
    """One entry of `inputs` with its data behind the JSON."""
    return member(**{"parameters": {"binary_data_size": size}, **members})


def decode(
    found: Mapping[str, Any], binary: bytes = b"", regions: SharedMemory | None = None
) -> tuple[InferRequest, OutputForms]:
    decoder = InferDecoder(regions or Regions(), LIMIT)
    return decoder.decode(Target(MODEL), json.dumps(found).encode(), memoryview(binary))


def request_of(**members: Any) -> InferRequest:
    return decode({"inputs": [given(1.0)], **members})[0]


def forms_of(**members: Any) -> OutputForms:
    return decode({"inputs": [given(1.0)], **members})[1]


def refusal(found: Mapping[str, Any], binary: bytes = b"") -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        decode(found, binary)
    return caught.value.code, caught.value.message


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


# Parameters.


def test_parameters_of_four_kinds_reach_the_model() -> None:
    found = {"a": 1, "b": 2.5, "c": True, "d": "x", "e": 2**63, "f": -(2**63), "headers": "h"}
    parameters = request_of(parameters=found).parameters
    assert parameters == {**found, "e": 2.0**63}
    kinds = [type(value) for value in parameters.values()]
    assert kinds == [int, float, bool, str, float, int, str]


def test_some_parameters_are_the_protocols_own() -> None:
    request = request_of(
        parameters={
            "sequence_id": 7,
            "sequence_start": True,
            "sequence_end": False,
            "priority": 2,
            "timeout": 50,
            "binary_data_output": True,
        }
    )
    assert request.sequence == SequenceTag(7, start=True, end=False)
    assert (request.priority, request.timeout_us) == (2, 50)
    assert request.parameters == {}


@pytest.mark.parametrize("nothing", [0, ""])
def test_a_sequence_has_an_id(nothing: int | str) -> None:
    request = request_of(parameters={"sequence_id": nothing, "sequence_start": True})
    assert request.sequence is None


def test_the_id_of_a_sequence_may_be_text() -> None:
    assert request_of(parameters={"sequence_id": "x" * 128}).sequence == SequenceTag("x" * 128)
    assert refusal({"inputs": [], "parameters": {"sequence_id": "x" * 129}}) == (
        Code.UNSUPPORTED,
        "string correlation ID cannot be longer than 128 characters",
    )


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("sequence_id", 1.5, "string as string"),
        ("sequence_id", -1, "string as string"),
        ("sequence_id", True, "string as string"),
        ("sequence_start", 1, "boolean as boolean"),
        ("sequence_end", "true", "boolean as boolean"),
        ("priority", -1, "unsigned-integer as unsigned-integer"),
        ("priority", "1", "unsigned-integer as unsigned-integer"),
        ("timeout", 1.0, "unsigned-integer as unsigned-integer"),
        ("timeout", None, "unsigned-integer as unsigned-integer"),
        ("binary_data_output", 1, "boolean as boolean"),
    ],
)
def test_a_known_parameter_has_its_kind(key: str, value: Any, kind: str) -> None:
    assert refusal({"inputs": [], "parameters": {key: value}}) == (
        Code.INTERNAL,
        f"Unable to parse '{key}': attempt to access JSON non-{kind}",
    )


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_other_kinds_are_no_parameters(value: Any) -> None:
    assert refusal({"inputs": [], "parameters": {"k": value}}) == (
        Code.INVALID_ARG,
        "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'.",
    )


def test_some_keys_are_reserved() -> None:
    assert refusal({"inputs": [], "parameters": {"triton_x": 1}}) == (
        Code.INVALID_ARG,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
        "specified.",
    )


def test_forwarded_headers_become_parameters() -> None:
    target = Target(MODEL, headers=[("X-Tenant", "a"), ("k", "header")])
    body = b'{"inputs":[],"parameters":{"k":"own"}}'
    request, _ = InferDecoder(Regions(), LIMIT).decode(target, body, memoryview(b""))
    assert request.parameters == {"X-Tenant": "a", "k": "header"}


@pytest.mark.parametrize("name", ["timeout", "headers", "binary_data_output", "triton_x"])
def test_a_header_cannot_pass_for_a_parameter_of_the_protocol(name: str) -> None:
    target = Target(MODEL, headers=[(name, "1")])
    with pytest.raises(InferenceError) as caught:
        InferDecoder(Regions(), LIMIT).decode(target, b'{"inputs":[]}', memoryview(b""))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"Header '{name}' is reserved for Triton usage and cannot be forwarded.",
    )


# Outputs.


def output(name: str = "Y", **parameters: Any) -> dict[str, Any]:
    """One entry of `outputs`."""
    return {"name": name, "parameters": parameters} if parameters else {"name": name}


@pytest.mark.parametrize(
    ("members", "form"),
    [
        ({}, False),
        ({"outputs": []}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"parameters": {"binary_data_output": False}}, False),
        ({"outputs": [output()], "parameters": {"binary_data_output": True}}, False),
        ({"outputs": [output(binary_data=True)]}, True),
        (
            {"outputs": [output(binary_data=False)], "parameters": {"binary_data_output": True}},
            False,
        ),
        ({"outputs": [output(classification=2, binary_data=True)]}, True),
    ],
)
def test_the_request_says_which_outputs_are_binary(members: dict[str, Any], form: bool) -> None:
    forms = forms_of(**members)
    assert forms.is_binary("Y") is form
    assert forms.wants("Y")
    assert forms.wants("Z") is not bool(members.get("outputs"))


def test_outputs_are_asked_for_by_name() -> None:
    request = request_of(outputs=[output("A"), output("B", classification=3), output("C", x=1)])
    assert request.outputs == (RequestedOutput("A"), RequestedOutput("B", 3), RequestedOutput("C"))


def test_an_output_may_go_to_shared_memory() -> None:
    where = output(shared_memory_region="r", shared_memory_byte_size=8, shared_memory_offset=4)
    found = {"inputs": [given(1.0)], "outputs": [where]}
    request, _ = decode(found, regions=Regions(r=b""))
    assert request.outputs == (RequestedOutput("Y", region=SharedRegion("r", 8, 4)),)
    assert refusal(found) == (Code.NOT_FOUND, "Unable to find shared memory region: 'r'")


@pytest.mark.parametrize(
    ("found", "code", "message"),
    [
        (
            5,
            Code.INTERNAL,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (
            {"name": 5},
            Code.INTERNAL,
            "Unable to parse 'name': attempt to access JSON non-string as string",
        ),
        (output(classification="1"), Code.INTERNAL, f"Unable to set 'classification': {UNSIGNED}"),
        (output(classification=-1), Code.INTERNAL, f"Unable to set 'classification': {UNSIGNED}"),
        (output(classification=True), Code.INTERNAL, f"Unable to set 'classification': {UNSIGNED}"),
        (
            output(binary_data="yes"),
            Code.INTERNAL,
            "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
        ),
        (
            output(shared_memory_region="r", classification=1),
            Code.INVALID_ARG,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            output(shared_memory_region="r", binary_data=True),
            Code.INVALID_ARG,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
        (
            output(shared_memory_region="r", shared_memory_byte_size=-1),
            Code.INTERNAL,
            f"Unable to parse 'shared_memory_byte_size': {UNSIGNED}",
        ),
        (
            output(shared_memory_region=5),
            Code.INTERNAL,
            "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string",
        ),
    ],
)
def test_a_wrong_output_is_refused(found: Any, code: Code, message: str) -> None:
    assert refusal({"inputs": [given(1.0)], "outputs": [found]}) == (code, message)


# Raw requests.


def raw(config: ModelConfig, body: bytes) -> InferRequest:
    request, forms = InferDecoder(Regions(), LIMIT).decode_raw(Target(config), memoryview(body))
    assert forms.is_binary("Y")
    assert forms.wants("Y")
    return request


def taking(datatype: str, *dims: int, max_batch_size: int = 0) -> ModelConfig:
    """A model with one input."""
    tensor = ModelInput(name="X", data_type=DataType(f"TYPE_{datatype}"), dims=dims)
    return ModelConfig(name="m", max_batch_size=max_batch_size, input=(tensor,))


@pytest.mark.parametrize(
    ("dims", "batch", "shape"),
    [
        ((-1,), 0, (4,)),
        ((4,), 0, (4,)),
        ((-1, 2), 0, (2, 2)),
        ((2, -1), 8, (1, 2, 2)),
        ((4,), 8, (1, 4)),
        ((2,), 0, (2,)),
        ((3, -1), 0, (3, 1)),
        ((0, -1), 0, (0, 0)),
    ],
)
def test_the_shape_of_raw_data_follows_from_its_size(
    dims: tuple[int, ...], batch: int, shape: tuple[int, ...]
) -> None:
    request = raw(taking("INT32", *dims, max_batch_size=batch), bytes(16))
    assert [(each.name, each.shape, len(each.raw())) for each in request.inputs] == [
        ("X", shape, 16)
    ]


@pytest.mark.parametrize(("batch", "shape"), [(0, (1,)), (4, (1, 1))])
def test_raw_text_is_one_element(batch: int, shape: tuple[int, ...]) -> None:
    (tensor,) = raw(taking("STRING", 1, max_batch_size=batch), b"hello").inputs
    assert (tensor.shape, tensor.elements()) == (shape, (b"hello",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MODEL,
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' "
            "model configuration",
        ),
        (
            taking("FP32", -1, -1),
            "The shape of the raw input 'X' can not be deduced because there are more than one "
            "variable-sized dimension",
        ),
        (
            taking("STRING", -1),
            "For BYTE datatype raw input 'X', the model must have input shape [1]",
        ),
    ],
)
def test_raw_data_must_determine_its_shape(config: ModelConfig, message: str) -> None:
    with pytest.raises(InferenceError) as caught:
        raw(config, bytes(16))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"[request id: <id_unknown>] {message}",
    )
