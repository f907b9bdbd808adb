"""Messages of the v2 protocol to requests (protocol, gRPC semantics)."""

from typing import Any

import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.parameters import HeaderForwarding
from gateway.frontends.grpc.request import RequestDecoder
from gateway.messages import InferRequest, RequestedOutput, SharedRegion
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Datatype
from tests.regions import shared_object

CONFIG = ModelConfig(
    name="m",
    backend="identity",
    input=(ModelInput(name="X", data_type=DataType.TYPE_INT32, dims=(-1,)),),
)
BOOL = pb.InferParameter(bool_param=True)
INT = pb.InferParameter(int64_param=8)
TEXT = pb.InferParameter(string_param="region")
UINT = pb.InferParameter(uint64_param=8)


def message(**fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", **fields)


def tensor(
    name: str = "X", datatype: str = "INT32", shape: tuple[int, ...] = (2,), **contents: Any
) -> pb.ModelInferRequest.InferInputTensor:
    found = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    if contents:
        found.contents.CopyFrom(pb.InferTensorContents(**contents))
    return found


def decode_request(
    asked: pb.ModelInferRequest, shared_memory: SharedMemory | None = None
) -> InferRequest:
    decoder = RequestDecoder(shared_memory or SharedMemory(), HeaderForwarding(""), ())
    return decoder.decode(asked, asked.raw_input_contents, CONFIG)


def decode(*inputs: pb.ModelInferRequest.InferInputTensor, **fields: Any) -> InferRequest:
    return decode_request(message(inputs=inputs, **fields))


def refusal(*inputs: pb.ModelInferRequest.InferInputTensor, **fields: Any) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        decode(*inputs, **fields)
    return caught.value.code, caught.value.message


def test_a_request_has_the_fields_of_its_message() -> None:
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
def test_half_precision_has_raw_contents_only(datatype: str) -> None:
    request = decode(tensor(datatype=datatype), raw_input_contents=[b"\0\x3c\0\xc0"])
    assert request.inputs[0].raw() == b"\0\x3c\0\xc0"


@pytest.mark.parametrize("datatype", ["INT32", "BYTES", "FP16"])
def test_contents_without_elements_are_no_bytes(datatype: str) -> None:
    empty = tensor(datatype=datatype, shape=(0, 3))
    empty.contents.SetInParent()
    (found,) = decode(empty).inputs
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


UNKNOWN_DATATYPES = ["", "STRING", "int32", "TYPE_INT32"]


@pytest.mark.parametrize("datatype", UNKNOWN_DATATYPES)
def test_a_datatype_goes_by_its_wire_name(datatype: str) -> None:
    found = refusal(tensor(datatype=datatype), raw_input_contents=[b"\0" * 8], id="7")
    assert found == (
        Code.INVALID_ARG,
        "[request id: 7] inference input 'X' data-type is '<invalid>', but model 'm' expects "
        "'INT32'",
    )


def test_an_unknown_datatype_of_an_unknown_input_is_an_unknown_input() -> None:
    found = refusal(tensor("Z", "NOPE"), raw_input_contents=[b"\0" * 8])
    assert found == (Code.INVALID_ARG, "unexpected inference input 'Z' for model 'm'")


@pytest.mark.parametrize("datatype", UNKNOWN_DATATYPES)
def test_contents_fit_no_unknown_datatype(datatype: str) -> None:
    assert refusal(tensor(datatype=datatype, int_contents=[1, 2])) == (
        Code.INVALID_ARG,
        "unexpected explicit tensor data for input tensor 'X' for model 'm' of type 'INT32', "
        "expected datatype '<invalid>'",
    )


# Shared memory (protocol 12.3).


def parameters_of(**values: Any) -> dict[str, pb.InferParameter]:
    return {f"shared_memory_{key}": value for key, value in values.items()}


def shared(
    name: str = "X", datatype: str = "INT32", **values: Any
) -> pb.ModelInferRequest.InferInputTensor:
    found = tensor(name, datatype)
    for key, value in parameters_of(**values).items():
        found.parameters[key].CopyFrom(value)
    return found


def wanted(**parameters: pb.InferParameter) -> pb.ModelInferRequest.InferRequestedOutputTensor:
    return pb.ModelInferRequest.InferRequestedOutputTensor(name="Y", parameters=parameters)


def test_an_input_in_shared_memory_takes_no_raw_contents() -> None:
    shared_memory = SharedMemory(allowed=True)
    with shared_object(bytes(range(16))) as key:
        shared_memory.register_system("region", key, 0, 16)
        first = shared("A", "UINT8", region=TEXT, byte_size=INT, offset=INT)
        asked = message(inputs=[first, tensor("B", "UINT8")], raw_input_contents=[b"ab"])
        a, b = decode_request(asked, shared_memory).inputs
    assert bytes(a.raw()) == bytes(range(8, 16))
    assert b.raw() == b"ab"


def test_contents_do_not_go_with_shared_memory() -> None:
    both = shared(region=TEXT, byte_size=INT)
    both.contents.SetInParent()
    assert refusal(both) == (
        Code.INVALID_ARG,
        "unexpected 'content' provided when using shared memory for input tensor 'X' for model 'm'",
    )


def test_an_unregistered_region_is_not_found() -> None:
    text = "Unable to find shared memory region: 'region'"
    assert refusal(shared(region=TEXT, byte_size=INT)) == (Code.NOT_FOUND, text)
    output = wanted(**parameters_of(region=TEXT, byte_size=INT))
    assert refusal(outputs=[output]) == (Code.NOT_FOUND, text)


REGION_REFUSALS = [
    (
        {"region": TEXT},
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
        "for tensor '{}'",
    ),
    (
        {"byte_size": INT},
        "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter "
        "for tensor '{}'",
    ),
    (
        {"byte_size": INT, "offset": INT},
        "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for "
        "tensor '{}'",
    ),
    (
        {"region": INT, "byte_size": INT},
        "invalid value type for 'shared_memory_region' parameter for tensor '{}', expected "
        "string_param.",
    ),
    (
        {"region": TEXT, "byte_size": UINT},
        "invalid value type for 'shared_memory_byte_size' parameter for tensor '{}', expected "
        "int64_param.",
    ),
    (
        {"region": TEXT, "byte_size": INT, "offset": TEXT},
        "invalid value type for 'shared_memory_offset' parameter for tensor '{}', expected "
        "int64_param.",
    ),
]
"""As Triton 2.51 answered."""


@pytest.mark.parametrize(("values", "text"), REGION_REFUSALS)
def test_a_region_has_a_name_and_a_size(values: dict[str, pb.InferParameter], text: str) -> None:
    assert refusal(shared(**values)) == (Code.INVALID_ARG, text.format("X"))
    output = wanted(**parameters_of(**values))
    assert refusal(outputs=[output]) == (Code.INVALID_ARG, text.format("Y"))


def test_an_output_is_tied_to_the_region_of_the_moment() -> None:
    shared_memory = SharedMemory(allowed=True)
    with shared_object(bytes(16)) as key:
        shared_memory.register_system("region", key, 0, 16)
        output = wanted(**parameters_of(region=TEXT, byte_size=INT))
        (found,) = decode_request(message(outputs=[output]), shared_memory).outputs
    assert found.region == SharedRegion("region", 8)
    assert found.region.memory is shared_memory.system_status("region")[0]


# Requested outputs (protocol 9, 18.3).


def test_outputs_may_be_classified() -> None:
    output = wanted(classification=pb.InferParameter(int64_param=3))
    assert decode(outputs=[output]).outputs == (RequestedOutput("Y", classes=3),)


@pytest.mark.parametrize("count", [0, -1])
def test_a_classification_has_classes(count: int) -> None:
    output = wanted(classification=pb.InferParameter(int64_param=count))
    text = "invalid value for 'classification' parameter, expected >= 0"
    assert refusal(outputs=[output]) == (Code.INVALID_ARG, text)


@pytest.mark.parametrize("count", [TEXT, UINT, BOOL])
def test_classes_are_a_number(count: pb.InferParameter) -> None:
    text = "invalid value type for 'classification' parameter, expected int64_param"
    assert refusal(outputs=[wanted(classification=count)]) == (Code.INVALID_ARG, text)


def test_classes_do_not_go_to_shared_memory() -> None:
    output = wanted(classification=INT, **parameters_of(region=TEXT, byte_size=INT))
    text = "output can't set both 'shared_memory_region' and 'classification'"
    assert refusal(outputs=[output]) == (Code.INVALID_ARG, text)


def test_other_parameters_of_tensors_are_ignored() -> None:
    given = tensor(datatype="INT32")
    given.parameters["binary_data_size"].int64_param = 8
    found = decode(given, raw_input_contents=[b"12345678"], outputs=[wanted(binary_data=BOOL)])
    assert found.outputs == (RequestedOutput("Y"),)
    assert found.inputs[0].raw() == b"12345678"
