"""v2 infer over HTTP: the official clients, and bytes that they would not send.

What is in ODD was asked of a Triton 2.51 with the same models in Python, which answered the same.
"""

import gzip
import json
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.conformance.clients import Client, connect
from tests.conformance.models import DATATYPES
from tests.raw import Connection, post
from tests.serving import Serving

FLAGS = ("--http-header-forward-pattern=^x-|^timeout$", "--http-max-input-size=1000000")
LIMIT = 1_000_000
FLOATS = struct.pack("<2f", 1.0, 2.0)
NUMPY = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "BYTES": np.object_,
}
JSON_DATATYPES = [each for each in DATATYPES if each not in ("FP16", "BF16")]


@pytest.fixture(params=["http", "http.aio"])
async def official(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    """Each of the two official clients for HTTP."""
    async with connect(server, request.param) as found:
        yield found


@pytest.fixture
def connection(server: Serving) -> Iterator[Connection]:
    """A connection on which a test writes what it likes."""
    with Connection(server.ports["http"]) as found:
        yield found


def values(datatype: str) -> Any:
    """An array with the extremes of a datatype."""
    if datatype == "BYTES":
        return np.array([[b"", "é".encode()], [b"a:b", b'"\\']], dtype=object)
    if datatype.startswith(("INT", "UINT")):
        kind = np.dtype(datatype.lower())
        return np.array([[np.iinfo(kind).min, 0], [1, np.iinfo(kind).max]], kind)
    return np.array([[0, 1], [1, 0.5]], NUMPY[datatype])


def sent(datatype: str, array: Any, *, binary: bool) -> Any:
    """An input with these values, flat: the models take vectors."""
    found = triton.InferInput("INPUT", [array.size], datatype)
    found.set_data_from_numpy(array.reshape(-1), binary_data=binary)
    return found


async def infer(client: Client, model: str, *inputs: Any, **options: Any) -> Any:
    return await client.call("infer", model, list(inputs), **options)


# The official clients.


@pytest.mark.parametrize("datatype", DATATYPES)
async def test_every_datatype_is_echoed_as_binary(official: Client, datatype: str) -> None:
    array = values(datatype).reshape(-1)
    model = f"echo_{datatype.lower()}"
    for outputs in (None, [triton.InferRequestedOutput("OUTPUT", binary_data=True)]):
        found = await infer(official, model, sent(datatype, array, binary=True), outputs=outputs)
        np.testing.assert_array_equal(found.as_numpy("OUTPUT"), array)
        (output,) = found.get_response()["outputs"]
        assert (output["datatype"], output["shape"]) == (datatype, [array.size])
        assert "data" not in output


@pytest.mark.parametrize("datatype", JSON_DATATYPES)
@pytest.mark.parametrize(
    ("binary_in", "binary_out"), [(False, False), (True, False), (False, True)]
)
async def test_every_datatype_but_half_precision_is_echoed_as_json(
    official: Client, datatype: str, binary_in: bool, binary_out: bool
) -> None:
    array = values(datatype).reshape(-1)
    outputs = [triton.InferRequestedOutput("OUTPUT", binary_data=binary_out)]
    found = await infer(
        official,
        f"echo_{datatype.lower()}",
        sent(datatype, array, binary=binary_in),
        outputs=outputs,
    )
    expected = array
    if datatype == "BYTES" and not binary_out:
        expected = np.array([each.decode() for each in array], object)
    np.testing.assert_array_equal(found.as_numpy("OUTPUT"), expected)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
async def test_half_precision_is_not_sent_as_json(official: Client, datatype: str) -> None:
    outputs = [triton.InferRequestedOutput("OUTPUT", binary_data=False)]
    tensor = sent(datatype, values(datatype), binary=True)
    code, text = await official.refusal(
        "infer", f"echo_{datatype.lower()}", [tensor], outputs=outputs
    )
    assert (code, text) == (
        "400",
        f"sending {datatype} data via JSON is not supported. Please use the binary data format "
        "for output",
    )


async def test_forms_may_be_mixed(official: Client) -> None:
    inputs = []
    for number, name in enumerate(("A", "B")):
        found = triton.InferInput(name, [2], "INT32")
        array = np.array([number, 10 + number], np.int32)
        found.set_data_from_numpy(array, binary_data=bool(number))
        inputs.append(found)
    outputs = [
        triton.InferRequestedOutput("Y", binary_data=False),
        triton.InferRequestedOutput("X", binary_data=True),
    ]
    answer = await infer(official, "pair", *inputs, outputs=outputs)
    assert answer.as_numpy("X").tolist() == [0, 10]
    assert answer.as_numpy("Y").tolist() == [1, 11]
    assert [each["name"] for each in answer.get_response()["outputs"]] == ["X", "Y"]


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("size", [2, 100_000])
async def test_bodies_may_be_compressed_both_ways(
    official: Client, algorithm: str | None, size: int
) -> None:
    array = np.arange(size, dtype=np.float32)
    found = await infer(
        official,
        "echo_fp32",
        sent("FP32", array, binary=True),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(found.as_numpy("OUTPUT"), array)


async def test_the_response_has_the_id_of_its_request(official: Client) -> None:
    tensor = sent("FP32", values("FP32"), binary=True)
    named = await infer(official, "echo_fp32", tensor, request_id="r 1")
    assert named.get_response()["id"] == "r 1"
    assert "id" not in (await infer(official, "echo_fp32", tensor)).get_response()


async def test_parameters_and_headers_reach_the_model(official: Client) -> None:
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"hi"], object))
    parameters = {"a": 1, "b": 2.5, "c": True, "d": "x"}
    found = await infer(
        official,
        "told",
        text,
        parameters=parameters,
        sequence_id=5,
        sequence_start=True,
        priority=1,
        timeout=100,
        headers={"X-Tenant": "blue", "Y-Tenant": "red"},
    )
    told = {key.lower(): value for key, value in found.get_response()["parameters"].items()}
    assert told == {**parameters, "x-tenant": "blue"}


@pytest.mark.parametrize("binary", [False, True])
async def test_classes_have_labels(official: Client, binary: bool) -> None:
    array = np.array([0.1, 0.9, 0.5, 0.7], np.float32)
    outputs = [triton.InferRequestedOutput("OUTPUT", binary_data=binary, class_count=3)]
    found = await infer(official, "labelled", sent("FP32", array, binary=True), outputs=outputs)
    texts = [str(each, "utf-8") if binary else each for each in found.as_numpy("OUTPUT")]
    assert texts == ["0.900000:1:one", "0.700000:3", "0.500000:2:two"]


async def test_each_item_of_a_batch_has_its_classes(official: Client) -> None:
    tensor = triton.InferInput("INPUT", [2, 3], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2, 3], [9, 8, 7]], np.float32))
    outputs = [triton.InferRequestedOutput("OUTPUT", class_count=2)]
    found = (await infer(official, "classes", tensor, outputs=outputs)).as_numpy("OUTPUT")
    assert found.tolist() == [
        [b"3.000000:2", b"2.000000:1"],
        [b"9.000000:0", b"8.000000:1"],
    ]


async def test_a_version_may_be_asked_for(official: Client) -> None:
    tensor = sent("FP32", values("FP32"), binary=True)
    for asked, used in (("", "3"), ("1", "1")):
        found = await infer(official, "versioned", tensor, model_version=asked)
        assert found.get_response()["model_version"] == used
    assert await official.refusal("infer", "versioned", [tensor], model_version="2") == (
        "404",
        "Request for unknown model: 'versioned' version 2 is not found",
    )


def test_many_requests_of_one_client_run_side_by_side(server: Serving) -> None:
    address = server.http.removeprefix("http://")
    with triton.InferenceServerClient(address, concurrency=8) as client:
        arrays = [np.full(16, number, np.float32) for number in range(200)]
        pending = [
            client.async_infer("echo_fp32", [sent("FP32", array, binary=True)]) for array in arrays
        ]
        for array, answer in zip(arrays, pending, strict=True):
            np.testing.assert_array_equal(answer.get_result().as_numpy("OUTPUT"), array)


def test_a_tensor_may_be_far_larger_than_the_limit_of_json(server: Serving) -> None:
    array = np.random.default_rng(1).random(10 * LIMIT // 4, np.float32)
    with triton.InferenceServerClient(server.http.removeprefix("http://")) as client:
        found = client.infer("echo_fp32", [sent("FP32", array, binary=True)])
        np.testing.assert_array_equal(found.as_numpy("OUTPUT"), array)
        few = sent("FP32", array[: LIMIT // 8], binary=False)
        with pytest.raises(InferenceServerException, match="request JSON size of"):
            client.infer("echo_fp32", [few])


# Odd requests, and what a real Triton said.

UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
SIZE = '"parameters":{"binary_data_size":'


def tensor(data: str, shape: str = "[2]", datatype: str = "FP32") -> str:
    """A request with one input in JSON."""
    fields = f'"name":"INPUT","datatype":"{datatype}","shape":{shape}'
    return f'{{"inputs":[{{{fields},{data}}}]}}'


def answer(data: str, shape: str = "[2]", datatype: str = "FP32") -> str:
    """The response of a model with one output in JSON."""
    return (
        f'{{"model_name":"echo_{datatype.lower()}","model_version":"1","outputs":[{{"name":'
        f'"OUTPUT","datatype":"{datatype}","shape":{shape},"data":{data}}}]}}'
    )


def error(text: str) -> str:
    """The body of an error."""
    return json.dumps({"error": text}, separators=(",", ":"))


ODD = [
    ("fp32", tensor('"data":[0.1,1]'), 200, answer("[0.10000000149011612,1.0]")),
    (
        "fp32",
        tensor('"data":[NaN,Inf,-Inf,Infinity,-Infinity]', "[5]"),
        200,
        answer("[NaN,Infinity,-Infinity,Infinity,-Infinity]", "[5]"),
    ),
    ("fp32", tensor('"data":[1,[2,[3]],[],4]', "[4]"), 200, answer("[1.0,2.0,3.0,4.0]", "[4]")),
    (
        "uint8",
        tensor('"data":[300,255]', datatype="UINT8"),
        200,
        answer("[44,255]", "[2]", "UINT8"),
    ),
    ("int8", tensor('"data":[300,-129]', datatype="INT8"), 200, answer("[44,127]", "[2]", "INT8")),
    (
        "int32",
        tensor(f'"data":[{2**40 + 5},1]', datatype="INT32"),
        200,
        answer("[5,1]", "[2]", "INT32"),
    ),
    (
        "int64",
        tensor(f'"data":[{2**63},1]', datatype="INT64"),
        500,
        error(
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
        ),
    ),
    (
        "uint8",
        tensor('"data":[1,-1]', datatype="UINT8"),
        500,
        error(f"Unable to parse 'data': {UNSIGNED}"),
    ),
    (
        "bool",
        tensor('"data":[1,0]', datatype="BOOL"),
        500,
        error("Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    ),
    ("fp32", tensor('"data":[1,"x"]', "[0]"), 200, answer("[]", "[0]")),
    ("fp32", tensor('"data":[1,2]', "[-1]"), 500, error(f"Unable to parse 'shape': {UNSIGNED}")),
    ("fp32", tensor('"data":[1,2]', "[2.0]"), 500, error(f"Unable to parse 'shape': {UNSIGNED}")),
    (
        "fp32",
        tensor('"data":1'),
        500,
        error("Unable to parse 'data': attempt to access JSON non-array as array"),
    ),
    (
        "fp32",
        tensor('"data":[1,2,3]'),
        500,
        error("Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ),
    (
        "bytes",
        tensor('"data":["a"]', datatype="BYTES"),
        400,
        error(
            "[request id: <id_unknown>] expected 2 string elements for inference input 'INPUT' "
            "for model 'echo_bytes', got 1"
        ),
    ),
    (
        "bytes",
        tensor('"data":["a","b","c"]', datatype="BYTES"),
        400,
        error(
            "[request id: <id_unknown>] unexpected number of string elements 3 for inference "
            "input 'INPUT' for model 'echo_bytes', expecting 2"
        ),
    ),
    (
        "fp32",
        tensor('"data":[1,2]', datatype="FLOAT"),
        400,
        error("invalid datatype for input INPUT"),
    ),
    (
        "fp32",
        '{"id":"a","id":"b","inputs":[]}',
        400,
        error(
            "[request id: a] expected 1 inputs but got 0 inputs for model 'echo_fp32'. Got "
            "input(s) [], but missing required input(s) ['INPUT']. Please provide all required "
            "input(s)."
        ),
    ),
    (
        "fp32",
        '{"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1],"data":[1]}],'
        '"outputs":[{"name":"NOPE"}]}',
        400,
        error("unexpected inference output 'NOPE' for model 'echo_fp32'"),
    ),
    (
        "bool",
        '{"inputs":[{"name":"INPUT","datatype":"BOOL","shape":[1],"data":[true]}],'
        '"outputs":[{"name":"OUTPUT","parameters":{"classification":1}}]}',
        400,
        error("class result not available for output due to unsupported type 'BOOL'"),
    ),
    (
        "int32",
        '{"inputs":[{"name":"INPUT","datatype":"INT32","shape":[4],"data":[3,-5,3,7]}],'
        '"outputs":[{"name":"OUTPUT","parameters":{"classification":4}}]}',
        200,
        answer('["7:3","3:0","3:2","-5:1"]', "[4]", "BYTES").replace("echo_bytes", "echo_int32"),
    ),
    (
        "fp32",
        '{"inputs":5}',
        500,
        error("Unable to parse 'inputs': attempt to access JSON non-array as array"),
    ),
]


@pytest.mark.parametrize(("model", "request_text", "status", "text"), ODD)
def test_odd_json_is_answered_as_triton_does(
    http: httpx.Client, model: str, request_text: str, status: int, text: str
) -> None:
    found = http.post(
        f"/v2/models/echo_{model}/infer",
        content=request_text.encode(),
        headers={"accept-encoding": "identity"},
    )
    assert (found.status_code, found.text) == (status, text)


def binary(found: str, tail: bytes, length: int | str | None = None) -> bytes:
    """A request with binary data."""
    announced = f"Inference-Header-Content-Length: {len(found) if length is None else length}"
    return post("/v2/models/echo_fp32/infer", found.encode() + tail, announced)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (
            binary(tensor(SIZE + "12}"), FLOATS),
            400,
            "unexpected size for input 'INPUT', expecting 4 additional bytes for model 'echo_fp32'",
        ),
        (
            binary(tensor(SIZE + "4}"), FLOATS),
            400,
            "unexpected additional input data for model 'echo_fp32'",
        ),
        (
            binary(tensor(SIZE + "8}", "[3]"), FLOATS),
            400,
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT' for model "
            "'echo_fp32'. Expected 12, got 8",
        ),
        (
            binary(tensor(SIZE + "-8}"), FLOATS),
            500,
            f"Unable to parse 'binary_data_size': {UNSIGNED}",
        ),
        (
            binary(tensor(SIZE + "8}", datatype="FLOAT"), FLOATS),
            400,
            "[request id: <id_unknown>] inference input 'INPUT' data-type is '<invalid>', but "
            "model 'echo_fp32' expects 'FP32'",
        ),
        (
            binary(tensor(SIZE + '8},"data":[1,2]'), FLOATS),
            400,
            "Input must set only one of the following fields: 'data', 'binary_data_size' in "
            "'parameters', 'shared_memory_region' in 'parameters'. But set 'data' "
            "'binary_data_size'",
        ),
        (
            binary("{}", FLOATS, -1),
            400,
            "inference header size should be in range (0, 10), got: -1",
        ),
        (
            binary("{}", FLOATS, 2147483647),
            400,
            "inference header size should be in range (0, 10), got: 2147483647",
        ),
    ],
)
def test_odd_binary_data_is_answered_as_triton_does(
    connection: Connection, body: bytes, status: int, text: str
) -> None:
    connection.send(body)
    found = connection.answer()
    assert (found.status, found.json) == (status, {"error": text})
    still_serves(connection)


def still_serves(connection: Connection) -> None:
    """The same connection answers the next good request."""
    connection.send(binary(tensor(SIZE + "8}"), FLOATS))
    found = connection.answer()
    assert (found.status, found.json["outputs"][0]["data"]) == (200, [1.0, 2.0])


# Bad input.


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (binary("{}", b"", "9" * 1000), 400, "value is out of range"),
        (binary("{}", b"", "1e3"), 400, "Unable to parse Inference-Header-Content-Length"),
        (binary(tensor(SIZE + "8}", f"[{2**62},{2**62}]"), FLOATS), 400, "unexpected shape"),
        (binary(tensor(SIZE + "8}", f"[{2**64 - 1}]"), FLOATS), 400, "exceeds maximum size"),
        (binary(tensor('"data":[1]', f"[{2**62},{2**62}]"), b""), 400, "total element count"),
        (binary(tensor('"data":[1]', f"[{2**62}]"), b""), 400, "byte size overflow"),
        (binary(tensor('"data":[1]', f"[{2**30}]"), b""), 400, "maximum allowed value of"),
        (binary(tensor('"data":' + "[" * 101 + "1" + "]" * 101), b""), 400, "nesting depth"),
        (binary(tensor('"data":' + "[" * 99_999), b""), 500, "failed to parse"),
        (binary('{"inputs":[{},' + '"x",' * 50_000 + "5]}", b""), 400, "no field is set"),
        (post("/v2/models/echo_fp32/infer", b"{" + b" " * LIMIT), 400, "request JSON size of"),
        (binary("", bytes(LIMIT + 1), 0), 400, "Raw input has a byte_size"),
    ],
)
def test_bad_bodies_are_refused_and_the_connection_serves_on(
    connection: Connection, body: bytes, status: int, part: str
) -> None:
    connection.send(body)
    found = connection.answer()
    assert found.status == status
    assert part in found.json["error"]
    still_serves(connection)


PLAIN = '{"name":"OUTPUT"}'
BINARY = '{"name":"OUTPUT","parameters":{"binary_data":true}}'
TOP = '{"name":"OUTPUT","parameters":{"classification":1}}'
JSON_OUTPUT = '"datatype":"FP32","shape":[2],"data":[1.0,2.0]'
BINARY_OUTPUT = '"datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}'
TOP_OUTPUT = '"datatype":"BYTES","shape":[1],"data":["2.000000:1"]'


@pytest.mark.parametrize(
    ("outputs", "described"),
    [
        ((PLAIN,) * 2, JSON_OUTPUT),
        ((PLAIN,) * 1024, JSON_OUTPUT),
        ((BINARY, PLAIN), BINARY_OUTPUT),
        ((PLAIN, BINARY), JSON_OUTPUT),
        ((BINARY, BINARY), BINARY_OUTPUT),
        ((TOP, PLAIN), TOP_OUTPUT),
        ((PLAIN, TOP), JSON_OUTPUT),
    ],
)
def test_an_output_asked_for_twice_is_served_once_in_its_first_form(
    connection: Connection, outputs: tuple[str, ...], described: str
) -> None:
    """A real Triton 2.51 answers so."""
    body = tensor('"data":[1,2]')[:-1] + f',"outputs":[{",".join(outputs)}]}}'
    connection.send(post("/v2/models/echo_fp32/infer", body.encode()))
    found = connection.answer()
    size = int(found.headers.get("inference-header-content-length", len(found.body)))
    listed = f'"outputs":[{{"name":"OUTPUT",{described}}}]}}'
    assert found.status == 200
    assert found.body[:size].endswith(listed.encode())
    assert found.body[size:] == (FLOATS if described is BINARY_OUTPUT else b"")


def asking(*outputs: str) -> bytes:
    """A request for outputs of these names."""
    listed = ",".join(f'{{"name":"{name}"}}' for name in outputs)
    return binary(tensor('"data":[1,2]')[:-1] + f',"outputs":[{listed}]}}', b"")


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["O"] * 1024, "unexpected inference output 'O'"),
        ([str(number) for number in range(1024)], "unexpected inference output '0'"),
        (["OUTPUT"] * 1025, "the request lists 1025 outputs, expected at most 1024"),
        (["O"] * 50_000, "the request lists 50000 outputs, expected at most 1024"),
        (["OUTPUT", "../OUTPUT"], "unexpected inference output '../OUTPUT'"),
    ],
)
def test_outputs_that_are_not_the_models_are_refused_at_once(
    connection: Connection, names: list[str], part: str
) -> None:
    connection.send(asking(*names))
    found = connection.answer()
    assert found.status == 400
    assert part in found.json["error"]
    still_serves(connection)


def test_a_hundred_thousand_outputs_are_more_json_than_is_taken(connection: Connection) -> None:
    connection.send_as_taken(asking(*["OUTPUT"] * 100_000))
    assert "request JSON size of" in connection.answer().json["error"]


def test_thousands_of_inputs_are_refused_at_once(connection: Connection) -> None:
    inputs = ",".join(
        f'{{"name":"{number}","datatype":"FP32","shape":[0],"data":[]}}' for number in range(15_000)
    )
    connection.send(binary(f'{{"inputs":[{inputs}]}}', b""))
    found = connection.answer()
    assert found.status == 400
    assert "expected 1 inputs but got 15000 inputs" in found.json["error"]
    still_serves(connection)


@pytest.mark.parametrize("length", [3, 0xFFFFFFFF, 2**31])
def test_strings_that_overrun_are_refused(connection: Connection, length: int) -> None:
    tail = length.to_bytes(4, "little") + b"ab"
    text = tensor(SIZE + "6}", "[1]", "BYTES")
    announced = f"Inference-Header-Content-Length: {len(text)}"
    connection.send(post("/v2/models/echo_bytes/infer", text.encode() + tail, announced))
    found = connection.answer()
    assert (found.status, found.json["error"]) == (
        400,
        f"incomplete string data for inference input 'INPUT', expecting string of length {length} "
        "but only 2 bytes available",
    )
    still_serves(connection)


def test_a_bomb_is_refused_before_it_goes_off(server: Serving, connection: Connection) -> None:
    bomb = gzip.compress(bytes(200 * LIMIT), compresslevel=1)
    before = server.resident_bytes
    for length in ("", "Inference-Header-Content-Length: 2"):
        headers = ["Content-Encoding: gzip", *([length] if length else [])]
        connection.send(post("/v2/models/echo_fp32/infer", bomb, *headers))
        found = connection.answer()
        assert (found.status, found.json["error"]) == (
            400,
            f"Decompressed data size exceeds the maximum allowed value of {LIMIT} bytes. Use "
            "--http-max-input-size to increase the limit.",
        )
    assert server.resident_bytes - before < 50 * LIMIT
    still_serves(connection)


@pytest.mark.parametrize(
    "model",
    ["..", "a%2Fb", "%2e%2e%2fechofp32", "echo_fp32%00", "%00", "a" * 10_000, "%ff"],
)
def test_no_name_of_a_model_does_harm(connection: Connection, model: str) -> None:
    for version in ("", "/versions/1", "/versions/" + "9" * 5000, "/versions/..", "/versions/%00"):
        connection.send(post(f"/v2/models/{model}{version}/infer", b"{}"))
        found = connection.answer()
        assert found.status in (400, 404)
        assert "Traceback" not in found.json["error"]
    still_serves(connection)


def test_a_path_is_ascii(connection: Connection) -> None:
    connection.send(post("/v2/models/é/infer", b"{}"))
    assert connection.answer().status == 400
    assert connection.ended


@pytest.mark.parametrize("value", ["5", "x"])
def test_a_header_cannot_pass_for_a_parameter_of_the_protocol(
    connection: Connection, value: str
) -> None:
    text = tensor('"data":[1,2]')
    connection.send(post("/v2/models/echo_fp32/infer", text.encode(), f"Timeout: {value}"))
    assert connection.answer().status == 200
    connection.send(post("/v2/models/echo_fp32/infer", text.encode(), f"timeout: {value}"))
    assert connection.answer().json == {
        "error": "Header 'timeout' is reserved for Triton usage and cannot be forwarded."
    }


# Connections.


@pytest.mark.parametrize("reset", [False, True])
def test_the_model_stops_when_the_client_leaves(server: Serving, reset: bool) -> None:
    before = server.metric("nv_inference_request_failure", "stuck", reason="CANCELED")
    with Connection(server.ports["http"]) as client:
        client.ask("/v2/models/stuck/infer", ONE_TEXT)
        server.wait_metric("gateway_requests_in_flight", "stuck", 1)
        if reset:
            client.reset()
    server.wait_metric("gateway_requests_in_flight", "stuck", 0)
    server.wait_metric("nv_inference_request_failure", "stuck", before + 1, reason="CANCELED")


ONE_TEXT = {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}


def test_the_model_stops_when_a_client_leaves_that_had_sent_the_next_request(
    server: Serving,
) -> None:
    with Connection(server.ports["http"]) as client:
        for _ in range(3):
            client.ask("/v2/models/stuck/infer", ONE_TEXT)
        server.wait_metric("gateway_requests_in_flight", "stuck", 1)
    server.wait_metric("gateway_requests_in_flight", "stuck", 0)


def test_a_client_cannot_send_ahead_without_end(server: Serving) -> None:
    ahead = post("/v2/models/slow/infer", json.dumps(ONE_TEXT).encode()) * 300_000
    before = server.resident_bytes
    with Connection(server.ports["http"]) as client:
        client.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.send(ahead)
        assert server.resident_bytes - before < 100 * LIMIT
    server.wait_metric("gateway_requests_in_flight", "slow", 0)


def test_requests_sent_at_once_are_answered_in_order(connection: Connection) -> None:
    for number in range(50):
        connection.send(binary(tensor(f'"data":[{number},0]'), b""))
    for number in range(50):
        assert connection.answer().json["outputs"][0]["data"] == [number, 0.0]


def test_a_body_may_come_in_pieces(connection: Connection) -> None:
    whole = binary(tensor(SIZE + "8}"), FLOATS)
    for number in range(len(whole)):
        connection.send(whole[number : number + 1])
    assert connection.answer().json["outputs"][0]["data"] == [1.0, 2.0]


def test_a_body_may_be_chunked(connection: Connection) -> None:
    text = tensor(SIZE + "8}").encode()
    head = (
        "POST /v2/models/echo_fp32/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
    )
    connection.send(head.encode())
    for piece in (text[:10], text[10:] + FLOATS[:3], FLOATS[3:]):
        connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    connection.send(b"0\r\n\r\n")
    assert connection.answer().json["outputs"][0]["data"] == [1.0, 2.0]
    still_serves(connection)


def test_a_client_that_expects_a_go_ahead_gets_it(connection: Connection) -> None:
    text = tensor('"data":[1,2]').encode()
    connection.send(
        post("/v2/models/echo_fp32/infer", b"", "Expect: 100-continue").replace(
            b"Content-Length: 0", b"Content-Length: %d" % len(text)
        )
    )
    assert connection.line() == b"HTTP/1.1 100 Continue\r\n"
    assert connection.line() == b"\r\n"
    connection.send(text)
    assert connection.answer().status == 200


def test_a_slow_reader_gets_all_of_a_large_answer(server: Serving) -> None:
    size = 8 * LIMIT
    found = f'{{"name":"INPUT","datatype":"FP32","shape":[{size // 4}],{SIZE}{size}}}}}'
    text = f'{{"inputs":[{found}],"parameters":{{"binary_data_output":true}}}}'
    data = np.random.default_rng(2).bytes(size)
    with Connection(server.ports["http"], receive_buffer=4096) as client:
        sender = threading.Thread(target=client.send, args=(binary(text, data),))
        sender.start()
        head = client.head()
        sender.join()
        length = int(head.headers["inference-header-content-length"])
        client.read(length)
        assert client.read(size) == data
