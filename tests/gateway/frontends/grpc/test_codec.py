"""Messages of the v2 protocol to requests and responses to messages (protocol, gRPC semantics)."""

from typing import Any

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.codec import decode_request, encode_response, wants_empty_final
from gateway.messages import InferRequest, InferResponse, RequestedOutput, SequenceTag
from gateway.protos import grpc_service_pb2 as pb
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor

EMPTY_FINAL = "triton_enable_empty_final_response"


def message(**fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", **fields)


def tensor(
    name: str = "X", datatype: str = "INT32", shape: tuple[int, ...] = (2,), **contents: Any
) -> pb.ModelInferRequest.InferInputTensor:
    found = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    if contents:
        found.contents.CopyFrom(pb.InferTensorContents(**contents))
    return found


def decode(*inputs: pb.ModelInferRequest.InferInputTensor, **fields: Any) -> InferRequest:
    return decode_request(message(inputs=inputs, **fields))


def refusal(*inputs: pb.ModelInferRequest.InferInputTensor, **fields: Any) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        decode(*inputs, **fields)
    return caught.value.code, caught.value.message


def test_a_request_says_what_it_wants_of_whom() -> None:
    request = decode_request(
        pb.ModelInferRequest(
            model_name="m",
            model_version="3",
            id="r1",
            outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="Y")],
        )
    )
    assert (request.model, request.version, request.id) == ("m", "3", "r1")
    assert request.outputs == (RequestedOutput("Y"),)
    assert request.received_ns > 0


# Tensors (protocol 18.3).


@pytest.mark.parametrize(
    ("datatype", "contents", "values"),
    [
        ("BOOL", {"bool_contents": [True, False]}, [True, False]),
        ("INT8", {"int_contents": [1, -2]}, [1, -2]),
        ("INT16", {"int_contents": [1, -2]}, [1, -2]),
        ("INT32", {"int_contents": [1, -2]}, [1, -2]),
        ("INT64", {"int64_contents": [1, -(2**63)]}, [1, -(2**63)]),
        ("UINT8", {"uint_contents": [1, 255]}, [1, 255]),
        ("UINT16", {"uint_contents": [1, 65535]}, [1, 65535]),
        ("UINT32", {"uint_contents": [1, 2**32 - 1]}, [1, 2**32 - 1]),
        ("UINT64", {"uint64_contents": [1, 2**64 - 1]}, [1, 2**64 - 1]),
        ("FP32", {"fp32_contents": [0.5, -2.0]}, [0.5, -2.0]),
        ("FP64", {"fp64_contents": [0.1, -2.0]}, [0.1, -2.0]),
        ("INT8", {"int_contents": [256, 129]}, [0, -127]),
        ("UINT8", {"uint_contents": [256, 257]}, [0, 1]),
    ],
)
def test_contents_become_elements(
    datatype: str, contents: dict[str, list[object]], values: list[object]
) -> None:
    (found,) = decode(tensor(datatype=datatype, **contents)).inputs
    assert found.array().tolist() == values
    assert (found.name, found.datatype, found.shape) == ("X", Datatype(datatype), (2,))


def test_bytes_contents_have_no_lengths() -> None:
    (found,) = decode(tensor(datatype="BYTES", bytes_contents=[b"a", b"bc"])).inputs
    assert found.elements() == (b"a", b"bc")


def test_raw_contents_are_taken_in_the_order_of_the_inputs() -> None:
    request = decode(
        tensor("A", "INT8"),
        tensor("B", "BYTES", (1,)),
        raw_input_contents=[b"\x01\x02", b"\x01\0\0\0a", b"surplus"],
    )
    first, second = request.inputs
    assert first.array().tolist() == [1, 2]
    assert second.elements() == (b"a",)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_comes_raw(datatype: str) -> None:
    request = decode(tensor(datatype=datatype), raw_input_contents=[b"\0\x3c\0\xc0"])
    assert request.inputs[0].raw() == b"\0\x3c\0\xc0"


@pytest.mark.parametrize("datatype", ["INT32", "BYTES", "FP16"])
def test_a_tensor_without_elements_needs_no_data(datatype: str) -> None:
    (found,) = decode(tensor(datatype=datatype, shape=(0, 3))).inputs
    assert (found.shape, found.raw()) == ((0, 3), b"")


def test_an_input_without_data_is_refused() -> None:
    text = "unable to find data for input tensor 'X' for model 'm' in request."
    assert refusal(tensor()) == (Code.INVALID_ARG, text)


def test_an_input_behind_the_last_raw_contents_is_refused() -> None:
    found = refusal(tensor("A", "INT8"), tensor(), raw_input_contents=[b"\x01\x02"])
    text = "unable to find data for input tensor 'X' for model 'm' in request."
    assert found == (Code.INVALID_ARG, text)


def test_contents_do_not_go_with_raw_contents() -> None:
    assert refusal(tensor(int_contents=[1, 2]), raw_input_contents=[b"\0" * 8]) == (
        Code.INVALID_ARG,
        "contents field must not be specified when using raw_input_contents for 'X' for model 'm'",
    )


@pytest.mark.parametrize(
    ("datatype", "contents", "found"),
    [
        ("INT32", {"fp32_contents": [1.0]}, "FP32"),
        ("INT32", {"int64_contents": [1]}, "INT64"),
        ("UINT8", {"int_contents": [1]}, "INT32"),
        ("INT8", {"uint_contents": [1]}, "UINT32"),
        ("FP16", {"fp32_contents": [1.0]}, "FP32"),
        ("BYTES", {"bool_contents": [True]}, "BOOL"),
        ("FP32", {"bytes_contents": [b"a"]}, "BYTES"),
    ],
)
def test_contents_of_another_datatype_are_refused(
    datatype: str, contents: dict[str, list[object]], found: str
) -> None:
    assert refusal(tensor(datatype=datatype, **contents)) == (
        Code.INVALID_ARG,
        f"unexpected explicit tensor data for input tensor 'X' for model 'm' of type '{found}', "
        f"expected datatype '{datatype}'",
    )


def test_an_input_has_one_kind_of_contents() -> None:
    assert refusal(tensor(int_contents=[1, 2], fp32_contents=[1.0])) == (
        Code.INVALID_ARG,
        "unexpected explicit tensor data for input tensor 'X' for model 'm', binary data was "
        "already supplied.",
    )


@pytest.mark.parametrize("datatype", ["", "STRING", "fp32", "TYPE_FP32"])
def test_a_datatype_goes_by_its_wire_name(datatype: str) -> None:
    code, text = refusal(tensor(datatype=datatype), raw_input_contents=[b"\0" * 8])
    assert code is Code.INVALID_ARG
    assert "'X'" in text
    assert f"'{datatype}'" in text


def test_shared_memory_is_not_offered() -> None:
    shared = tensor()
    shared.parameters["shared_memory_region"].string_param = "region"
    code, text = refusal(shared)
    assert code is Code.UNSUPPORTED
    assert "shared memory" in text


# Parameters (protocol 18.4).


BOOL = pb.InferParameter(bool_param=True)
INT = pb.InferParameter(int64_param=5)
UINT = pb.InferParameter(uint64_param=5)
STRING = pb.InferParameter(string_param="s")
DOUBLE = pb.InferParameter(double_param=0.5)
UNSET = pb.InferParameter()


def test_what_the_server_does_not_know_is_the_clients_own() -> None:
    found = decode(parameters={"a": BOOL, "b": INT, "c": STRING, "d": DOUBLE, "stream": BOOL})
    assert found.parameters == {"a": True, "b": 5, "c": "s", "d": 0.5, "stream": True}


@pytest.mark.parametrize("value", [UINT, UNSET], ids=["uint64", "unset"])
def test_a_parameter_of_another_kind_is_refused(value: pb.InferParameter) -> None:
    assert refusal(parameters={"a": value}) == (
        Code.INVALID_ARG,
        "invalid value type for 'a' parameter, expected int64_param, bool_param, or string_param.",
    )


@pytest.mark.parametrize("value", [INT, UINT])
def test_a_priority_is_a_number(value: pb.InferParameter) -> None:
    found = decode(parameters={"priority": value})
    assert (found.priority, found.parameters) == (5, {})


def test_a_timeout_is_in_microseconds() -> None:
    found = decode(parameters={"timeout": INT})
    assert (found.timeout_us, found.parameters) == (5, {})


@pytest.mark.parametrize(("value", "correlation_id"), [(INT, 5), (STRING, "s")])
def test_a_sequence_has_an_id_and_flags(
    value: pb.InferParameter, correlation_id: int | str
) -> None:
    found = decode(parameters={"sequence_id": value, "sequence_start": BOOL})
    assert found.sequence == SequenceTag(correlation_id, start=True, end=False)
    assert found.parameters == {}


@pytest.mark.parametrize(
    "value",
    [pb.InferParameter(int64_param=0), pb.InferParameter(string_param="")],
    ids=["zero", "empty"],
)
def test_zero_and_nothing_are_no_sequence(value: pb.InferParameter) -> None:
    assert decode(parameters={"sequence_id": value}).sequence is None
    assert decode().sequence is None


def test_a_correlation_id_has_at_most_128_characters() -> None:
    longest = pb.InferParameter(string_param="x" * 128)
    assert decode(parameters={"sequence_id": longest}).sequence == SequenceTag("x" * 128)
    longer = pb.InferParameter(string_param="x" * 129)
    assert refusal(parameters={"sequence_id": longer}) == (
        Code.UNSUPPORTED,
        "string correlation ID cannot be longer than 128 characters",
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("sequence_id", BOOL, "int64_param or string_param"),
        ("sequence_start", INT, "bool_param"),
        ("sequence_end", STRING, "bool_param"),
        ("priority", STRING, "int64_param or uint64_param"),
        ("timeout", UINT, "int64_param"),
        (EMPTY_FINAL, INT, "bool_param"),
        (EMPTY_FINAL, UNSET, "bool_param"),
    ],
)
def test_a_known_parameter_of_another_kind_is_refused(
    key: str, value: pb.InferParameter, expected: str
) -> None:
    assert refusal(parameters={key: value}) == (
        Code.INVALID_ARG,
        f"invalid value type for '{key}' parameter, expected {expected}.",
    )


def test_a_priority_is_not_negative() -> None:
    assert refusal(parameters={"priority": pb.InferParameter(int64_param=-1)}) == (
        Code.INVALID_ARG,
        "invalid value for 'priority', expected value >= 0.",
    )


def test_names_of_triton_are_reserved() -> None:
    assert refusal(parameters={"triton_x": BOOL}) == (
        Code.INVALID_ARG,
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following "
        "keys starting with 'triton_' are allowed: triton_enable_empty_final_response",
    )


@pytest.mark.parametrize(
    ("value", "wanted"), [(True, True), (False, False), (None, False)], ids=["yes", "no", "absent"]
)
def test_an_empty_final_response_is_sent_to_who_asked_for_it(
    value: bool | None, wanted: bool
) -> None:
    given = {} if value is None else {EMPTY_FINAL: pb.InferParameter(bool_param=value)}
    asked = message(parameters=given)
    assert wants_empty_final(asked) is wanted
    assert decode_request(asked).parameters == {}


# Responses (protocol 18.5).


def test_a_response_has_one_raw_entry_per_output_in_order() -> None:
    response = InferResponse(
        outputs=(
            text_tensor("T", ["a", "bc"]),
            array_tensor("N", Datatype.INT16, np.array([[1, -2]])),
            Tensor("E", Datatype.FP32, (0, 4), b""),
        )
    )
    found = encode_response(response, "m", "3", "r1")
    assert (found.model_name, found.model_version, found.id) == ("m", "3", "r1")
    assert [(each.name, each.datatype, list(each.shape)) for each in found.outputs] == [
        ("T", "BYTES", [2]),
        ("N", "INT16", [1, 2]),
        ("E", "FP32", [0, 4]),
    ]
    assert list(found.raw_output_contents) == [
        b"\x01\0\0\0a\x02\0\0\0bc",
        b"\x01\0\xfe\xff",
        b"",
    ]
    assert not any(each.HasField("contents") for each in found.outputs)
    assert not found.parameters


def test_response_parameters_keep_their_kind() -> None:
    response = InferResponse(parameters={"b": True, "i": -5, "d": 0.5, "s": "x"})
    found = encode_response(response, "m", "1", "").parameters
    assert {key: value.WhichOneof("parameter_choice") for key, value in found.items()} == {
        "b": "bool_param",
        "i": "int64_param",
        "d": "double_param",
        "s": "string_param",
    }
    assert (found["b"].bool_param, found["i"].int64_param) == (True, -5)
    assert (found["d"].double_param, found["s"].string_param) == (0.5, "x")
