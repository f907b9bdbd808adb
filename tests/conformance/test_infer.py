"""ModelInfer: tensors raw and typed, parameters, requested outputs, and every refusal's text."""

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferRequestedOutput, service_pb2

from tests.conformance.clients import Client, tensor, text
from tests.rpc import connected
from tests.serving import WAIT_SECS, Serving

Infer = service_pb2.ModelInferRequest
PREFIX = "[request id: <id_unknown>] "
BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)
NUMPY = {
    "BOOL": np.bool_,
    **{
        f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("U", "") for bits in (8, 16, 32)
    },
    "UINT64": "uint64",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 2**16 - 1]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "FP32": ("fp32_contents", [0.1, -np.inf]),
    "FP64": ("fp64_contents", [0.1, np.inf]),
}
BIG_BYTES = 100 * 1024 * 1024


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


def ask(model: str, *inputs: Any, raw: tuple[bytes, ...] = (), **fields: Any) -> Any:
    """A request; an input is its name, datatype and shape, and contents if it has any."""
    request = Infer(model_name=model, raw_input_contents=raw, **fields)
    for name, datatype, shape, *contents in inputs:
        added = request.inputs.add(name=name, datatype=datatype, shape=shape)
        for field, values in dict(*contents).items():
            getattr(added.contents, field).extend(values)
    return request


def refusal(stub: Any, request: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=WAIT_SECS)
    return caught.value.code().name, caught.value.details()


def echo(values: list[float], **fields: Any) -> Any:
    raw = np.array(values, dtype=np.float32).tobytes()
    return ask("echo_fp32", ("INPUT", "FP32", [len(values)]), raw=(raw,), **fields)


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
@pytest.mark.parametrize("datatype", NUMPY)
async def test_a_raw_tensor_is_echoed_unchanged(client: Client, datatype: str) -> None:
    values = np.array([0, 1, 100], dtype=NUMPY[datatype])
    inputs = [tensor("INPUT", datatype, values)]
    answer = await client.call("infer", f"echo_{datatype.lower()}", inputs, request_id="7")
    assert answer.as_numpy("OUTPUT").dtype == values.dtype
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), values)
    shown = answer.get_response()
    assert (shown.id, shown.model_name, shown.model_version) == (
        "7",
        f"echo_{datatype.lower()}",
        "1",
    )
    assert [(o.name, o.datatype, list(o.shape)) for o in shown.outputs] == [
        ("OUTPUT", datatype, [3])
    ]


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_raw_text_is_echoed_unchanged(client: Client) -> None:
    inputs = [text("INPUT", "", "ä", b"\x00\xff")]
    answer = await client.call("infer", "echo_bytes", inputs)
    assert list(answer.as_numpy("OUTPUT")) == [b"", "ä".encode(), b"\x00\xff"]


def test_bf16_travels_as_its_bits(stub: Any) -> None:
    request = ask("echo_bf16", ("INPUT", "BF16", [2]), raw=(b"\x80\x3f\x00\x40",))
    assert stub.ModelInfer(request).raw_output_contents == [b"\x80\x3f\x00\x40"]


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_are_understood_and_answered_raw(stub: Any, datatype: str) -> None:
    field, values = TYPED[datatype]
    request = ask(f"echo_{datatype.lower()}", ("INPUT", datatype, [2], {field: values}))
    answer = stub.ModelInfer(request)
    assert answer.raw_output_contents == [np.array(values, dtype=NUMPY[datatype]).tobytes()]
    assert not answer.outputs[0].HasField("contents")


def test_typed_text_has_an_entry_per_element(stub: Any) -> None:
    request = ask("echo_bytes", ("INPUT", "BYTES", [2], {"bytes_contents": [b"a", b"bc"]}))
    wire = bytes.fromhex("0100000061020000006263")
    assert stub.ModelInfer(request).raw_output_contents == [wire]


@pytest.mark.parametrize(
    ("datatype", "value", "wire"),
    [("UINT8", 300, b"\x2c"), ("INT8", 200, b"\xc8"), ("INT16", 70000, b"\x70\x11")],
)
def test_an_integer_too_large_for_its_datatype_is_cut(
    stub: Any, datatype: str, value: int, wire: bytes
) -> None:
    field = TYPED[datatype][0]
    request = ask(f"echo_{datatype.lower()}", ("INPUT", datatype, [1], {field: [value]}))
    assert stub.ModelInfer(request).raw_output_contents == [wire]


@pytest.mark.parametrize(
    ("datatype", "contents", "message"),
    [
        ("INT32", {"fp32_contents": [1]}, " of type 'FP32', expected datatype 'INT32'"),
        ("INT64", {"int_contents": [1]}, " of type 'INT32', expected datatype 'INT64'"),
        ("FP32", {"fp64_contents": [1]}, " of type 'FP64', expected datatype 'FP32'"),
        ("FP16", {"fp32_contents": [1]}, " of type 'FP32', expected datatype 'FP16'"),
        ("BF16", {"uint_contents": [1]}, " of type 'UINT32', expected datatype 'BF16'"),
        ("BOOL", {"bytes_contents": [b"1"]}, " of type 'BYTES', expected datatype 'BOOL'"),
        (
            "INT32",
            {"int_contents": [1], "fp32_contents": [1]},
            ", binary data was already supplied.",
        ),
    ],
)
def test_contents_of_the_wrong_field_are_refused(
    stub: Any, datatype: str, contents: dict[str, Any], message: str
) -> None:
    model = f"echo_{datatype.lower()}"
    assert refusal(stub, ask(model, ("INPUT", datatype, [1], contents))) == (
        "INVALID_ARGUMENT",
        f"unexpected explicit tensor data for input tensor 'INPUT' for model '{model}'{message}",
    )


def test_raw_and_typed_contents_do_not_mix(stub: Any) -> None:
    values = ("A", "INT32", [2], {"int_contents": [1, 2]})
    request = ask("pair", values, ("B", "INT32", [2]), raw=(b"\x00" * 8,))
    assert refusal(stub, request) == (
        "INVALID_ARGUMENT",
        "contents field must not be specified when using raw_input_contents for 'A' for model "
        "'pair'",
    )


def test_surplus_raw_contents_are_ignored(stub: Any) -> None:
    request = ask("echo_fp32", ("INPUT", "FP32", [1]), raw=(b"\x00" * 4, b"surplus"))
    assert stub.ModelInfer(request).raw_output_contents == [b"\x00" * 4]


@pytest.mark.parametrize("raw", [(), (b"\x00" * 8,)])
def test_an_input_without_data_is_refused(stub: Any, raw: tuple[bytes, ...]) -> None:
    request = ask("pair", ("A", "INT32", [2]), ("B", "INT32", [2]), raw=raw)
    name = "B" if raw else "A"
    assert refusal(stub, request) == (
        "INVALID_ARGUMENT",
        f"unable to find data for input tensor '{name}' for model 'pair' in request.",
    )


@pytest.mark.parametrize("raw", [(), (b"",)])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BOOL"])
def test_a_tensor_of_size_zero_has_empty_data_and_an_entry_in_the_answer(
    stub: Any, datatype: str, raw: tuple[bytes, ...]
) -> None:
    request = ask(f"echo_{datatype.lower()}", ("INPUT", datatype, [0]), raw=raw)
    if not raw:
        # As Triton, which refuses the request where even these are missing.
        request.inputs[0].contents.SetInParent()
    answer = stub.ModelInfer(request)
    assert list(answer.outputs[0].shape) == [0]
    assert answer.raw_output_contents == [b""]


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
@pytest.mark.parametrize(
    ("asked", "answered"),
    [([], ["X", "Y"]), (["X"], ["X"]), (["Y"], ["Y"]), (["Y", "X"], ["X", "Y"])],
)
async def test_requested_outputs_come_in_the_models_order(
    client: Client, asked: list[str], answered: list[str]
) -> None:
    values = {name: np.array([number, number], np.int32) for number, name in enumerate("AB")}
    inputs = [tensor(name, "INT32", array) for name, array in values.items()]
    outputs = [InferRequestedOutput(name) for name in asked]
    answer = (await client.call("infer", "pair", inputs, outputs=outputs)).get_response()
    assert [output.name for output in answer.outputs] == answered
    sources = {"X": "A", "Y": "B"}
    expected = [values[sources[name]].tobytes() for name in answered]
    assert list(answer.raw_output_contents) == expected


def test_optional_inputs_may_be_left_out_or_given(stub: Any) -> None:
    required = [("A", "INT32", [2]), ("B", "INT32", [2])]
    raw = (b"\x01" * 8,)
    assert stub.ModelInfer(ask("pair", *required, raw=raw * 2))
    assert stub.ModelInfer(ask("pair", *required, ("C", "INT32", [2]), raw=raw * 3))


@pytest.mark.parametrize("request_id", ["", "id 1", "ü" * 100])
def test_the_id_is_echoed(stub: Any, request_id: str) -> None:
    assert stub.ModelInfer(echo([1], id=request_id)).id == request_id


def test_the_version_that_answered_is_named(stub: Any) -> None:
    for asked, answered in (("", "3"), ("1", "1"), ("3", "3")):
        request = echo([1], model_version=asked)
        request.model_name = "versioned"
        assert stub.ModelInfer(request).model_version == answered


def test_unary_answers_carry_no_final_flag(stub: Any) -> None:
    assert dict(stub.ModelInfer(echo([1])).parameters) == {}


def test_the_parameters_of_a_response_keep_their_kind(stub: Any) -> None:
    request = ask("annotated", ("text_input", "BYTES", [1], {"bytes_contents": [b"x"]}))
    parameters = stub.ModelInfer(request).parameters
    kinds = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    assert kinds == {
        "score": "double_param",
        "n": "int64_param",
        "ok": "bool_param",
        "s": "string_param",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("a", {"int64_param": -1}),
        ("a", {"bool_param": True}),
        ("a", {"string_param": "x"}),
        ("a", {"double_param": 0.5}),
        ("binary_data_output", {"bool_param": True}),
        ("sequence_id", {"int64_param": 0}),
        ("sequence_id", {"string_param": "x" * 128}),
        ("sequence_start", {"bool_param": True}),
        ("sequence_end", {"bool_param": True}),
        ("priority", {"int64_param": 1}),
        ("priority", {"uint64_param": 2**63}),
        ("timeout", {"int64_param": 10}),
        ("triton_enable_empty_final_response", {"bool_param": True}),
    ],
)
def test_parameters_of_the_right_kind_are_accepted(
    stub: Any, key: str, value: dict[str, Any]
) -> None:
    request = echo([1])
    request.parameters[key].CopyFrom(service_pb2.InferParameter(**value))
    assert stub.ModelInfer(request).raw_output_contents


RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
    "starting with 'triton_' are allowed: triton_enable_empty_final_response"
)
CUSTOM = "expected int64_param, bool_param, or string_param."


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("a", {"uint64_param": 1}, f"invalid value type for 'a' parameter, {CUSTOM}"),
        ("a", {}, f"invalid value type for 'a' parameter, {CUSTOM}"),
        (
            "sequence_id",
            {"bool_param": True},
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            "sequence_start",
            {"int64_param": 1},
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        (
            "sequence_end",
            {"string_param": "true"},
            "invalid value type for 'sequence_end' parameter, expected bool_param.",
        ),
        (
            "priority",
            {"string_param": "1"},
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        ),
        ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
        (
            "timeout",
            {"uint64_param": 1},
            "invalid value type for 'timeout' parameter, expected int64_param.",
        ),
        (
            "triton_enable_empty_final_response",
            {"int64_param": 1},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected "
            "bool_param.",
        ),
        ("triton_x", {"bool_param": True}, RESERVED),
        ("triton_final_response", {"bool_param": True}, RESERVED),
    ],
)
def test_parameters_of_the_wrong_kind_are_refused(
    stub: Any, key: str, value: dict[str, Any], message: str
) -> None:
    request = echo([1])
    request.parameters[key].CopyFrom(service_pb2.InferParameter(**value))
    assert refusal(stub, request) == ("INVALID_ARGUMENT", message)


def test_a_correlation_id_that_is_too_long_is_unimplemented(stub: Any) -> None:
    request = echo([1])
    request.parameters["sequence_id"].string_param = "x" * 129
    assert refusal(stub, request) == (
        "UNIMPLEMENTED",
        "string correlation ID cannot be longer than 128 characters",
    )


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_a_decoupled_model_is_refused(client: Client) -> None:
    assert await client.refusal("infer", "repeat", [text("text_input", "x")]) == (
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


@pytest.mark.parametrize(
    ("model", "version", "code", "message"),
    [
        ("nope", "", "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
        ("pair", "2", "NOT_FOUND", "Request for unknown model: 'pair' version 2 is not found"),
        (
            "pair",
            "x",
            "INVALID_ARGUMENT",
            "failed to get model version from specified version string 'x' (details: stol), "
            "version should be an integral value > 0",
        ),
    ],
)
def test_an_unknown_model_is_refused(
    stub: Any, model: str, version: str, code: str, message: str
) -> None:
    assert refusal(stub, ask(model, model_version=version)) == (code, message)


def zeros(count: int) -> tuple[bytes, ...]:
    return (b"\x00" * 4 * count,)


A, B, C = (("A", "INT32", [2]), ("B", "INT32", [2]), ("C", "INT32", [2]))
LENGTH_CUT = (
    "incomplete string length indicator for inference input 'INPUT' for model 'echo_bytes', "
    "expecting 4 bytes but only 2 bytes available. Please make sure the string length indicator "
    "is in one buffer."
)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            ask("pair", A, raw=zeros(2)),
            PREFIX + "expected number of inputs between 2 and 3 but got 1 inputs for model 'pair'. "
            "Got input(s) ['A'], but missing required input(s) ['B']. Please provide all required "
            "input(s).",
        ),
        (
            ask("sixteen", id="mine"),
            "[request id: mine] expected 1 inputs but got 0 inputs for model 'sixteen'. Got "
            "input(s) [], but missing required input(s) ['INPUT']. Please provide all required "
            "input(s).",
        ),
        (
            ask("pair", A, B, ("D", "INT32", [2]), raw=zeros(2) * 3),
            "unexpected inference input 'D' for model 'pair'",
        ),
        (
            ask("pair", A, A, B, raw=zeros(2) * 3),
            PREFIX + "input 'A' already exists in request",
        ),
        (
            ask("echo_fp32", ("INPUT", "INT32", [1]), raw=zeros(1)),
            PREFIX + "inference input 'INPUT' data-type is 'INT32', but model 'echo_fp32' expects "
            "'FP32'",
        ),
        (
            ask("sixteen", ("INPUT", "FP32", [8]), raw=zeros(8)),
            PREFIX + "unexpected shape for input 'INPUT' for model 'sixteen'. Expected [16], got "
            "[8]. ",
        ),
        (
            ask("batched", ("INPUT", "FP32", [1, 8]), raw=zeros(8)),
            PREFIX + "unexpected shape for input 'INPUT' for model 'batched'. Expected [-1,16], "
            f"got [1,8]. {BATCH_NOTE}",
        ),
        (
            ask("batched", ("INPUT", "FP32", []), raw=zeros(1)),
            PREFIX + "input 'INPUT' has no shape but model requires batch dimension for 'batched'",
        ),
        (
            ask("batched", ("INPUT", "FP32", [9, 16]), raw=zeros(9 * 16)),
            PREFIX + "inference request batch-size must be <= 8 for 'batched'",
        ),
        (
            ask("matrix", ("INPUT", "FP32", [1, -1]), raw=zeros(1)),
            PREFIX + "All input dimensions should be specified for input 'INPUT' for model "
            "'matrix', got [1,-1]",
        ),
        (
            ask("sixteen", ("INPUT", "FP32", [16]), raw=zeros(15)),
            PREFIX + "input byte size mismatch for input 'INPUT' for model 'sixteen'. Expected 64, "
            "got 60",
        ),
        (
            ask("echo_bytes", ("INPUT", "BYTES", [3]), raw=(b"\x00" * 8,)),
            PREFIX + "expected 3 string elements for inference input 'INPUT' for model "
            "'echo_bytes', got 2",
        ),
        (
            ask("echo_bytes", ("INPUT", "BYTES", [3]), raw=(b"\x00" * 16,)),
            PREFIX + "unexpected number of string elements 4 for inference input 'INPUT' for model "
            "'echo_bytes', expecting 3",
        ),
        (ask("echo_bytes", ("INPUT", "BYTES", [1]), raw=(b"\x00\x00",)), PREFIX + LENGTH_CUT),
        (
            ask("echo_bytes", ("INPUT", "BYTES", [1]), raw=(b"\x1e\x00\x00\x00abc",)),
            "incomplete string data for inference input 'INPUT', expecting string of length 30 but "
            "only 3 bytes available",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_with_tritons_text(
    stub: Any, request_: Any, message: str
) -> None:
    assert refusal(stub, request_) == ("INVALID_ARGUMENT", message)


def test_an_output_that_the_model_lacks_is_refused(stub: Any) -> None:
    request = ask("pair", A, B, raw=zeros(2) * 2)
    request.outputs.add(name="Z")
    message = "unexpected inference output 'Z' for model 'pair'"
    assert refusal(stub, request) == ("INVALID_ARGUMENT", message)


@pytest.mark.parametrize("outputs", [["X", "X"], ["X", "Y", "X"], ["X"] * 1024])
def test_an_output_asked_for_twice_is_served_once(stub: Any, outputs: list[str]) -> None:
    request = ask("pair", A, B, raw=zeros(2) * 2)
    for name in outputs:
        request.outputs.add(name=name)
    answer = stub.ModelInfer(request, timeout=WAIT_SECS)
    assert [each.name for each in answer.outputs] == list(dict.fromkeys(outputs))
    assert len(answer.raw_output_contents) == len(answer.outputs)


def test_a_datatype_that_does_not_exist_is_refused(stub: Any) -> None:
    assert refusal(stub, ask("echo_fp32", ("INPUT", "FP128", [1]), raw=zeros(1))) == (
        "INVALID_ARGUMENT",
        "[request id: <id_unknown>] inference input 'INPUT' data-type is '<invalid>', but model "
        "'echo_fp32' expects 'FP32'",
    )


@pytest.mark.parametrize(
    ("model", "name", "code", "message"),
    [
        ("failing", "INPUT", "INTERNAL", "the model says no"),
        ("unavailable", "text_input", "UNAVAILABLE", "come back later"),
        (
            "crashing",
            "text_input",
            "INTERNAL",
            "model 'crashing' failed unexpectedly; the server's log says why",
        ),
        ("twice", "text_input", "INTERNAL", "expected a single response, got 2"),
        ("silent", "text_input", "INTERNAL", "expected a single response, got 0"),
    ],
)
def test_a_models_failure_has_its_code(
    stub: Any, model: str, name: str, code: str, message: str
) -> None:
    request = ask(model, (name, "BYTES", [1], {"bytes_contents": [b"x"]}))
    assert refusal(stub, request) == (code, message)


def test_a_hundred_megabytes_go_there_and_back(stub: Any) -> None:
    data = bytes(BIG_BYTES)
    request = ask("echo_uint8", ("INPUT", "UINT8", [BIG_BYTES]), raw=(data,))
    answer = stub.ModelInfer(request, timeout=3 * WAIT_SECS)
    assert answer.raw_output_contents == [data]


@pytest.mark.parametrize("client", ["grpc"], indirect=True)
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_a_compressed_request_is_understood(client: Client, algorithm: str) -> None:
    values = np.zeros(10_000, dtype=np.float32)
    answer = await client.call(
        "infer", "echo_fp32", [tensor("INPUT", "FP32", values)], compression_algorithm=algorithm
    )
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), values)


@pytest.mark.parametrize("client", ["grpc"], indirect=True)
async def test_async_infer_calls_back(client: Client) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    for number in range(10):
        values = np.array([number], dtype=np.float32)
        await client.call(
            "async_infer",
            "echo_fp32",
            [tensor("INPUT", "FP32", values)],
            callback=lambda result, error: answers.put((result, error)),
        )
    found = [answers.get(timeout=WAIT_SECS) for _ in range(10)]
    assert [error for _, error in found if error] == []
    assert sorted(float(result.as_numpy("OUTPUT")[0]) for result, _ in found) == list(range(10))
