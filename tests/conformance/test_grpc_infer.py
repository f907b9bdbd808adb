"""Cases of gRPC's infer alone: forwarded metadata, classification, and malformed requests."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferRequestedOutput, service_pb2

from tests.conformance.clients import Client, tensor, text
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving

FLAGS = ("--grpc-header-forward-pattern=^(x-|timeout|triton_)",)
SCORES = np.array([[0.5, 0.9, 0.1], [3, -1, 2]], np.float32)
MANY = 100_000


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


def refusal(stub: Any, request: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=WAIT_SECS, **options)
    return caught.value.code().name, caught.value.details()


def told(parameters: Any) -> dict[str, object]:
    """The parameters of a response, each of the kind it came as."""
    return {
        key: getattr(value, str(value.WhichOneof("parameter_choice")))
        for key, value in parameters.items()
    }


# Parameters and metadata.


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_a_model_gets_parameters_of_every_kind(client: Client) -> None:
    given = {"b": True, "i": -5, "d": 0.5, "s": "ü"}
    answer = await client.call("infer", "told", [text("text_input", "x")], parameters=given)
    assert told(answer.get_response().parameters) == given


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_a_model_gets_metadata_that_the_pattern_finds(client: Client) -> None:
    answer = await client.call(
        "infer",
        "told",
        [text("text_input", "x")],
        headers={"x-tenant": "a", "other": "b"},
        parameters={"own": 1},
    )
    assert told(answer.get_response().parameters) == {"own": 1, "x-tenant": "a"}


def test_every_request_of_a_stream_gets_the_streams_metadata(stub: Any) -> None:
    with streaming(stub, metadata=[("x-tenant", "a")]) as rpc:
        rpc.ask(infer_request("told_stream", "1", text_input="x"))
        rpc.ask(infer_request("told", "2", text_input="x"))
        answers = rpc.rest()
    found = {each.infer_response.id: told(each.infer_response.parameters) for each in answers}
    expected = {"x-tenant": "a", "triton_final_response": True}
    assert found == {"1": expected, "2": expected}


@pytest.mark.parametrize("name", ["timeout", "triton_grpc_error"])
def test_reserved_metadata_that_the_pattern_finds_are_refused(stub: Any, name: str) -> None:
    request = infer_request("told", text_input="x")
    text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert refusal(stub, request, metadata=[(name, "true")]) == ("INVALID_ARGUMENT", text)
    with streaming(stub, metadata=[(name, "true")]) as rpc:
        rpc.ask(infer_request("told", "1", text_input="x"))
        (answer,) = rpc.rest()
    assert (answer.infer_response.id, answer.error_message) == ("1", text)


# Classification.


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_an_output_is_classified(client: Client) -> None:
    inputs = [tensor("INPUT", "FP32", SCORES)]
    outputs = [InferRequestedOutput("OUTPUT", class_count=2)]
    answer = await client.call("infer", "classes", inputs, outputs=outputs)
    assert answer.as_numpy("OUTPUT").tolist() == [
        [b"0.900000:1", b"0.500000:0"],
        [b"3.000000:0", b"2.000000:2"],
    ]


def scores(model: str, datatype: str, classes: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    shape = [1, 3] if model == "classes" else [3]
    request.inputs.add(name="INPUT", datatype=datatype, shape=shape)
    size = {"FP32": 4, "FP16": 2, "BYTES": 4, "INT64": 8}[datatype]
    request.raw_input_contents.append(bytes(3 * size))
    request.outputs.add(name="OUTPUT", parameters={"classification": classes})
    return request


NUMBER = service_pb2.InferParameter(int64_param=2)


@pytest.mark.parametrize("datatype", ["FP16", "BYTES"])
def test_what_has_no_order_is_not_classified(stub: Any, datatype: str) -> None:
    """A real Triton 2.51 answers so for FP16, and ends for BYTES."""
    assert refusal(stub, scores(f"echo_{datatype.lower()}", datatype, NUMBER)) == (
        "INVALID_ARGUMENT",
        f"class result not available for output due to unsupported type '{datatype}'",
    )


def test_more_classes_than_elements_are_all_elements(stub: Any) -> None:
    many = service_pb2.InferParameter(int64_param=2**40)
    answer = stub.ModelInfer(scores("classes", "FP32", many), timeout=WAIT_SECS)
    assert list(answer.outputs[0].shape) == [1, 3]
    answer = stub.ModelInfer(scores("echo_int64", "INT64", many), timeout=WAIT_SECS)
    assert answer.raw_output_contents == [b"\x03\0\0\x000:0\x03\0\0\x000:1\x03\0\0\x000:2"]


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        (
            service_pb2.InferParameter(int64_param=0),
            "invalid value for 'classification' parameter, expected >= 0",
        ),
        (
            service_pb2.InferParameter(string_param="1"),
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
    ],
)
def test_a_classification_says_how_many_classes(stub: Any, classes: Any, text: str) -> None:
    assert refusal(stub, scores("classes", "FP32", classes)) == ("INVALID_ARGUMENT", text)


def test_a_stream_classifies(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(scores("classes", "FP32", NUMBER))
        (answer,) = rpc.rest()
    assert answer.infer_response.outputs[0].datatype == "BYTES"
    assert list(answer.infer_response.outputs[0].shape) == [1, 2]


# Malformed requests. The texts are those of a real Triton 2.51 where it has the check.


def echo(*shape: int, raw: bytes = b"12345678", **fields: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name="echo_fp32", id="7", **fields)
    request.inputs.add(name="INPUT", datatype="FP32", shape=shape)
    request.raw_input_contents.append(raw)
    return request


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((-1,), "All input dimensions should be specified for input 'INPUT'"),
        ((-2,), "tensor 'INPUT' contains an invalid dimension [-2]"),
        ((-(2**63),), "contains an invalid dimension"),
        ((2**63 - 1,), "byte size for tensor 'INPUT' exceeds maximum size of 9223372036854775807"),
        ((2**62,), "byte size for tensor 'INPUT' exceeds maximum size of 9223372036854775807"),
        ((), "unexpected shape for input 'INPUT'"),
        ((2**32, 2**32), "unexpected shape for input 'INPUT'"),
        ((0,), "input byte size mismatch for input 'INPUT'"),
        ((1,) * 1000, "unexpected shape for input 'INPUT'"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(stub: Any, shape: tuple[int, ...], text: str) -> None:
    code, found = refusal(stub, echo(*shape))
    assert code == "INVALID_ARGUMENT"
    assert text in found


@pytest.mark.parametrize(
    ("model", "version", "code"),
    [
        *((name, "", "NOT_FOUND") for name in ("", "../echo_fp32", "echo_fp32\0", "a/b", "..")),
        *(("echo_fp32", version, "INVALID_ARGUMENT") for version in ("x", "../1", "1\0", "1/2")),
        ("echo_fp32", "0", "NOT_FOUND"),
        ("echo_fp32", "9" * 5000, "INVALID_ARGUMENT"),
    ],
)
def test_odd_names_of_models_and_versions_are_refused(
    stub: Any, model: str, version: str, code: str
) -> None:
    request = echo(2)
    request.model_name, request.model_version = model, version
    assert refusal(stub, request)[0] == code
    with streaming(stub) as rpc:
        rpc.ask(request, echo(2))
        refused, answered = rpc.rest()
    assert refused.error_message
    assert answered.infer_response.raw_output_contents == [b"12345678"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1024, "unexpected inference output 'o0' for model 'echo_fp32'"),
        (1025, "the request lists 1025 outputs, expected at most 1024; list each output once"),
        (MANY, "the request lists 100000 outputs, expected at most 1024; list each output once"),
    ],
)
def test_very_many_outputs_are_refused(stub: Any, count: int, text: str) -> None:
    request = echo(2)
    for number in range(count):
        request.outputs.add(name=f"o{number}")
    code, found = refusal(stub, request)
    assert code == "INVALID_ARGUMENT"
    assert found.startswith(text)


@pytest.mark.parametrize(("first", "second"), [(2, None), (None, 2), (2, 1)])
def test_an_output_asked_for_twice_has_its_first_form_that_is_not_the_default(
    stub: Any, first: int | None, second: int | None
) -> None:
    """A real Triton 2.51 answers so, on gRPC alone: over HTTP the first form counts."""
    request = scores("echo_fp32", "FP32", NUMBER)
    del request.outputs[:]
    for classes in (first, second):
        asked = request.outputs.add(name="OUTPUT")
        if classes is not None:
            asked.parameters["classification"].int64_param = classes
    (found,) = stub.ModelInfer(request, timeout=WAIT_SECS).outputs
    assert (found.datatype, list(found.shape)) == ("BYTES", [2])


def test_very_many_inputs_are_refused(stub: Any) -> None:
    request = echo(2)
    for number in range(MANY):
        request.inputs.add(name=f"i{number}", datatype="FP32", shape=[2])
        request.raw_input_contents.append(b"12345678")
    code, text = refusal(stub, request)
    assert code == "INVALID_ARGUMENT"
    assert f"expected 1 inputs but got {MANY + 1} inputs" in text


def test_an_input_is_given_once(stub: Any) -> None:
    request = echo(2)
    request.inputs.add(name="INPUT", datatype="FP32", shape=[2])
    request.raw_input_contents.append(b"12345678")
    text = "[request id: 7] input 'INPUT' already exists in request"
    assert refusal(stub, request) == ("INVALID_ARGUMENT", text)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
@pytest.mark.parametrize("junk", [b"\x3a\xff\xff\xff\xff\x7f", b"\xff" * 20000])
def test_what_is_no_message_is_refused(server: Serving, method: str, junk: bytes) -> None:
    path = f"/inference.GRPCInferenceService/{method}"
    with grpc.insecure_channel(server.grpc) as channel:
        answers = channel.stream_stream(path)(iter([junk]), timeout=WAIT_SECS)
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
    assert caught.value.code().name == "INTERNAL"
    assert caught.value.details() == "Unable to parse request"


@pytest.mark.parametrize("size", [16384, 2**20, 2**20 + 1])
def test_large_tensors_are_echoed_whole(stub: Any, size: int) -> None:
    data = np.random.default_rng(size).bytes(size - size % 4)
    request = echo(len(data) // 4, raw=data)
    assert stub.ModelInfer(request, timeout=WAIT_SECS).raw_output_contents == [data]
    with streaming(stub) as rpc:
        rpc.ask(request)
        (answer,) = rpc.rest()
    assert answer.infer_response.raw_output_contents == [data]
