"""Input that no client should send: it is answered or cut off, and the next request is served."""

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.leaving import Account
from tests.raw import Answer, Connection, get, post
from tests.serving import ROOT, WAIT_SECS, Serving, wait_until

MAX_BODY = 1024 * 1024
FLAGS = (f"--http-max-input-size={MAX_BODY}",)
HEAD_LIMIT = 64 * 1024
ROUNDS = 20
FLOOD_BYTES = 100 * 1024 * 1024
ALLOWED_GROWTH = 32 * 1024 * 1024
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
GENERATE = "/v2/models/repeat/generate"
GOOD = {"text_input": "x", "n": 1}
TOO_LARGE = "exceeds the maximum allowed input size of 1048576 bytes. Use --http-max-input-size to"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def channel(server: Serving) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options=options) as found:
        yield found


@pytest.fixture(autouse=True)
def _still_serving(server: Serving, http: httpx.Client, channel: grpc.Channel) -> Iterator[None]:
    yield
    assert http.post(GENERATE, json=GOOD).json()["text_output"] == "x"
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECS).live
    wait_until(lambda: Account.read(server, "repeat").is_idle, "nothing is in flight")


@pytest.fixture
def check(repository: Path) -> Callable[[str], str]:
    """A message passes if it tells nothing about the host."""

    def tells_nothing(message: str) -> str:
        for secret in ("Traceback", "site-packages", "/root", str(repository), str(ROOT), '.py"'):
            assert secret not in message
        return message

    return tells_nothing


Check = Callable[[str], str]


def error_of(answer: Answer | httpx.Response, check: Check) -> str:
    """The message of an error, which is all that its body holds."""
    body = answer.body if isinstance(answer, Answer) else answer.content
    found = json.loads(body)
    assert list(found) == ["error"]
    return check(found["error"])


NOT_JSON = "failed to parse the request JSON buffer: "


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 500, NOT_JSON + "The document is empty. at 0"),
        (b" \r\n\t", 500, NOT_JSON + "The document is empty. at 0"),
        (b"nonsense", 500, NOT_JSON),
        (b'{"text_input": "x"', 500, NOT_JSON),
        (b'{"text_input": "x",}', 500, NOT_JSON),
        (b'{"text_input": NaN}', 500, "attempt to access JSON non-string as string"),
        (b'{"text_input": nan}', 500, NOT_JSON),
        (b'{"text_input": "\xff\xfe"}', 400, NOT_JSON + "found byte 0xff at 16, expected UTF-8"),
        (b'{"text_input": "\\ud800"}', 400, NOT_JSON + "The surrogate pair in string is invalid."),
        (b"\x00" * 100, 500, NOT_JSON),
        (b"[" * 100_000 + b"]" * 100_000, 500, NOT_JSON),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 500, NOT_JSON),
        (b"[1, 2]", 500, "attempt to access JSON non-object as object"),
        (b'"text"', 500, "attempt to access JSON non-object as object"),
        (b"null", 500, "attempt to access JSON non-object as object"),
        (b"17", 500, "attempt to access JSON non-object as object"),
        (b"{}", 400, "missing required input(s) ['text_input','n']"),
        (b'{"n": 1}', 400, "missing required input(s) ['text_input']"),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    http: httpx.Client, check: Check, endpoint: str, body: bytes, status: int, message: str
) -> None:
    answer = http.post(f"/v2/models/repeat/{endpoint}", content=body)
    assert answer.status_code == status
    assert message in error_of(answer, check)


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"n": "1"}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as"),
        ({"n": 1.5}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as"),
        ({"n": True}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as"),
        ({"n": None}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as"),
        ({"n": {}}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as"),
        ({"n": [[1]]}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as"),
        ({"n": [1, 2]}, 400, "The schema can not convert input 'n' to tensor with proper shape"),
        ({"n": []}, 400, "The schema can not convert input 'n' to tensor with proper shape"),
        ({"n": 10**400}, 500, "failed to parse the request JSON buffer: "),
        ({"text_input": 1}, 500, "attempt to access JSON non-string as string"),
        ({"text_input": None}, 500, "attempt to access JSON non-string as string"),
        ({"text_input": True}, 500, "attempt to access JSON non-string as string"),
        ({"text_input": ["a", "b"]}, 400, "The schema can not convert input 'text_input'"),
        ({"id": 5}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"id": None}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"x": None}, 400, "parameter 'x' has invalid type. It should be either 'int', 'bool', or"),
        ({"x": []}, 400, "parameter 'x' has invalid type. It should be either 'int', 'bool', or"),
        ({"x": {}}, 400, "parameter 'x' has invalid type. It should be either 'int', 'bool', or"),
        ({"parameters": []}, 500, "Expected JSON object for keyword: 'parameters': attempt to"),
        ({"parameters": 1}, 500, "Expected JSON object for keyword: 'parameters': attempt to"),
        (
            {"parameters": {"x": {"y": 1}}},
            400,
            "Converting keyword: 'parameters': parameter 'x' has invalid type.",
        ),
        ({"parameters": {"n": 2}}, 400, "input 'n' already exists in request"),
        ({"parameters": {"text_input": 5}}, 400, "input 'text_input' already exists in request"),
    ],
)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_a_value_of_the_wrong_kind_is_refused(
    http: httpx.Client,
    check: Check,
    endpoint: str,
    changes: dict[str, Any],
    status: int,
    message: str,
) -> None:
    body = json.dumps({**GOOD, **changes})
    answer = http.post(f"/v2/models/repeat/{endpoint}", content=body)
    assert (answer.status_code, message) == (status, message)
    assert message in error_of(answer, check)


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"text_input":"x","n":1,"text_input":"y"}', "{}input 'text_input' already exists"),
        ('{"n":1,"text_input":"x","n" \n:\t1}', "{}input 'n' already exists in request"),
        (
            '{"text_input":"x","parameters":{"n":1,"n":1}}',
            "Converting keyword: 'parameters': {}input 'n' already exists in request",
        ),
        (
            '{"text_input":"x","n":NaN,"n":1}',
            "{}input 'n' already exists in request",
        ),
    ],
)
def test_an_input_that_stands_twice_is_refused(
    http: httpx.Client, check: Check, endpoint: str, body: str, message: str
) -> None:
    """A real Triton 2.51 answers so."""
    for more, prefix in (("", "<id_unknown>"), (',"id":"late"', "late")):
        answer = http.post(f"/v2/models/repeat/{endpoint}", content=body[:-1] + more + "}")
        assert answer.status_code == 400
        assert message.format(f"[request id: {prefix}] ") in error_of(answer, check)


@pytest.mark.parametrize(
    "text",
    [
        '"text_input":"text_input"',
        '{"text_input":{"text_input":[{"n":1},{"n":2}]}}',
        '"n":1, "n":1',
    ],
)
def test_the_name_of_an_input_may_stand_anywhere_else(http: httpx.Client, text: str) -> None:
    body = json.dumps({"text_input": text, "more": text, "n": 1})
    assert http.post(GENERATE, content=body).json()["text_output"] == text
    nested = json.dumps({"text_input": {"text_input": 1, "n": ["n", "n"]}, "n": 1})
    assert http.post(GENERATE, content=nested).status_code == 200


@pytest.mark.parametrize("depth", [1, 200, 2000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_the_index_takes_no_nested_ready(
    http: httpx.Client, check: Check, depth: int, brackets: str
) -> None:
    opened = brackets[0] + ('"a":' if brackets == "{}" else "")
    body = '{"ready": ' + opened * depth + "true" + brackets[1] * depth + "}"
    answer = http.post("/v2/repository/index", content=body)
    assert answer.status_code == 400
    assert error_of(answer, check) == "Invalid value for 'ready': expected a boolean"


@pytest.mark.parametrize("depth", [100, 250, 500, 1000])
def test_deep_json_in_place_of_text_is_answered(
    http: httpx.Client, check: Check, depth: int
) -> None:
    nested = '{"text_input":' + '{"a":' * depth + "1" + "}" * depth + ',"n":1}'
    answer = http.post(GENERATE, content=nested)
    if answer.status_code == 200:
        assert answer.json()["text_output"] == nested[14:-7]
    else:
        assert answer.status_code == 400
        assert "'text_input'" in error_of(answer, check)


@pytest.mark.parametrize(
    "path",
    [
        *("/v2/models/nope/generate", "/v2/models/repeat/versions/7/generate"),
        *("/v2/models/%2e%2e/generate", "/v2/models/..%2f..%2fetc/generate"),
        *("/v2/models/%ff%fe/generate", "/v2/models/%00/generate", "/v2/models/" + "x" * 9000),
        "/v2/models/repeat/versions/" + "9" * 5000 + "/generate",
    ],
)
def test_an_unknown_model_is_refused(http: httpx.Client, check: Check, path: str) -> None:
    answer = http.post(path, json=GOOD)
    assert answer.status_code in (400, 404, 405)
    assert error_of(answer, check)


def test_a_body_at_the_limit_is_accepted_and_one_beyond_refused(
    http: httpx.Client, check: Check
) -> None:
    good = json.dumps(GOOD).encode()
    assert http.post(GENERATE, content=good.ljust(MAX_BODY)).status_code == 200
    answer = http.post(GENERATE, content=good.ljust(MAX_BODY + 1))
    assert answer.status_code == 400
    assert error_of(answer, check) == (
        "request JSON size of 1048577 bytes exceeds the maximum allowed input size of 1048576 "
        "bytes. Use --http-max-input-size to increase the limit."
    )


def test_a_body_that_announces_too_much_is_refused_before_it_is_read(
    server: Serving, check: Check
) -> None:
    before = server.resident_bytes
    with Connection(server.ports["http"]) as connection:
        head = f"POST {GENERATE} HTTP/1.1\r\nContent-Length: {FLOOD_BYTES}\r\n\r\n"
        connection.send(head.encode())
        answer = connection.answer()
        assert answer.status == 400
        assert TOO_LARGE in error_of(answer, check)
        connection.send_as_taken(b" " * FLOOD_BYTES)
    assert server.resident_bytes - before < ALLOWED_GROWTH


def test_a_connection_serves_requests_after_a_body_that_was_too_large(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.send(post(GENERATE, b" " * (4 * MAX_BODY)))
        assert connection.answer().status == 400
        connection.ask(GENERATE, GOOD)
        assert connection.answer().status == 200


def test_a_body_without_a_length_is_refused_at_the_limit(server: Serving, check: Check) -> None:
    before = server.resident_bytes
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with Connection(server.ports["http"]) as connection:
        connection.send(f"POST {GENERATE} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        connection.send_as_taken(chunk * (FLOOD_BYTES // 0x10000))
        answer = connection.answer()
    assert answer.status == 400
    assert TOO_LARGE in error_of(answer, check)
    assert server.resident_bytes - before < ALLOWED_GROWTH


def too_large_head(server: Serving, data: bytes) -> Answer:
    """The answer to a head beyond the limit, all of which the client sends."""
    with Connection(server.ports["http"]) as connection:
        connection.send(data)
        answer = connection.answer()
        assert connection.ended
    return answer


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        ("one header", True),
        ("one header", False),
        ("many headers", True),
        ("many headers", False),
        ("request line", True),
        ("request line", False),
    ],
)
@pytest.mark.parametrize("size", [HEAD_LIMIT + 1, 200_000, 5_000_000])
def test_a_head_beyond_the_limit_is_refused_and_dropped(
    server: Serving, check: Check, shape: str, ends: bool, size: int
) -> None:
    before = server.resident_bytes
    data = head_of(shape, size)
    if not ends:
        data = data.removesuffix(b"\r\n\r\n").removesuffix(b" HTTP/1.1").ljust(size, b"x")
    answer = too_large_head(server, data)
    assert answer.status == 431
    assert error_of(answer, check) == "request line and headers exceed 65536 bytes"
    assert server.resident_bytes - before < ALLOWED_GROWTH


@pytest.mark.parametrize("shape", ["one header", "many headers", "request line"])
def test_a_head_at_the_limit_is_accepted(server: Serving, shape: str) -> None:
    with Connection(server.ports["http"]) as connection:
        for _ in range(2):
            connection.send(head_of(shape, HEAD_LIMIT))
            assert connection.answer().status == 200


def head_of(shape: str, size: int) -> bytes:
    """A GET whose head has exactly `size` bytes."""
    start, end = b"GET /v2/health/live", b" HTTP/1.1\r\n\r\n"
    if shape == "request line":
        return start + b"?" + b"x" * (size - len(start) - len(end) - 1) + end
    start += b" HTTP/1.1\r\n"
    count = 1 if shape == "one header" else 500
    total = size - len(start) - 2
    each = total // count
    lines = [b"h%04d: " % number for number in range(count)]
    sizes = [each] * (count - 1) + [total - each * (count - 1)]
    padded = [line.ljust(width - 2, b"x") for line, width in zip(lines, sizes, strict=True)]
    return start + b"\r\n".join(padded) + b"\r\n\r\n"


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/models/nope/infer"])
@pytest.mark.parametrize("beyond", [b"0\r\n" + b"a: b\r\n" * 500_000, b"1;x=" + b"x" * 3_000_000])
def test_what_stands_around_chunks_is_bounded(server: Serving, path: str, beyond: bytes) -> None:
    before = server.resident_bytes
    head = f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with Connection(server.ports["http"]) as connection, suppress(ConnectionResetError):
        connection.send_as_taken(head + beyond)
        while connection.line():
            """The server answers, or not, and closes the connection."""
    assert server.resident_bytes - before < ALLOWED_GROWTH


def test_trailers_at_the_end_of_a_body_are_let_pass(server: Serving) -> None:
    head = b"POST /v2/repository/index HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    trailers = b"X-Checksum: %b\r\n" % (b"x" * (HEAD_LIMIT - 100))
    with Connection(server.ports["http"]) as connection:
        for _ in range(2):
            connection.send(head + b"2;ext=1\r\n{}\r\n0\r\n" + trailers + b"\r\n")
            assert connection.answer().status == 200


def test_a_body_in_a_hundred_thousand_chunks_is_answered(server: Serving, check: Check) -> None:
    body = json.dumps(GOOD).encode().ljust(100_000)
    head = f"POST {GENERATE} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with Connection(server.ports["http"]) as connection:
        connection.send(head + chunks)
        answer = connection.answer()
    # Chunks that arrive together are one to the gateway; what it counts are those that do not.
    if answer.status != 200:
        assert "exceeds maximum of 65536 non-empty chunks" in error_of(answer, check)


def test_a_flood_of_chunk_extensions_takes_no_memory(server: Serving) -> None:
    before = server.resident_bytes
    head = f"POST {GENERATE} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;".encode()
    with Connection(server.ports["http"]) as connection:
        connection.send(head)
        for _ in range(20):
            connection.send_as_taken(b"x" * 1_000_000)
        assert server.resident_bytes - before < ALLOWED_GROWTH


@pytest.mark.parametrize(
    "data",
    [
        PREFACE,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"\x00" * 1000,
        b"\r\n" * 100 + b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\n: no name\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nname: \x00\r\n\r\n",
        b"GET /v2/\xff HTTP/1.1\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_json_and_cut_off(
    server: Serving, check: Check, data: bytes
) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.send(data)
        answer = connection.answer()
        assert answer.status == 400
        assert answer.headers["content-type"] == "application/json"
        assert error_of(answer, check)
        assert connection.ended


def test_a_broken_chunk_ends_its_request(server: Serving) -> None:
    head = f"POST {GENERATE} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with Connection(server.ports["http"]) as connection:
        connection.send(head + b"zz\r\nnonsense\r\n")
        assert connection.answer().status == 400
        assert connection.ended


@pytest.mark.parametrize("start", [b"", b"GET ", b"POST /v2 HTTP/1.1\r\n", PREFACE])
@pytest.mark.parametrize("port", ["http", "grpc", "metrics"])
def test_random_bytes_harm_no_port(server: Serving, port: str, start: bytes) -> None:
    source = random.Random(port)
    for _ in range(ROUNDS):
        with Connection(server.ports[port]) as connection:
            connection.send_as_taken(start + source.randbytes(4096))


@pytest.mark.parametrize(
    "data",
    [
        b"P",
        b"POST /v2/models/repeat/gen",
        b"POST /v2/models/repeat/generate HTTP/1.1\r\nContent-Le",
        b"POST /v2/models/repeat/generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n",
        b'POST /v2/models/repeat/generate HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"text_input": ',
        b"POST /v2/models/repeat/generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
@pytest.mark.parametrize("leave", [Connection.close, Connection.reset])
@pytest.mark.parametrize("port", ["http", "metrics"])
def test_half_a_request_is_forgotten_when_its_client_leaves(
    server: Serving, port: str, leave: Callable[[Connection], None], data: bytes
) -> None:
    open_before = server.open_files
    with Connection(server.ports[port]) as connection:
        connection.send(data)
        leave(connection)
        wait_until(lambda: server.open_files <= open_before, "the connection is closed")


def test_two_hundred_silent_connections_block_no_other_client(
    server: Serving, http: httpx.Client
) -> None:
    assert http.post(GENERATE, json=GOOD).status_code == 200  # its connection stays open
    open_before = server.open_files
    silent = [socket.create_connection(("127.0.0.1", server.ports["http"])) for _ in range(200)]
    try:
        assert http.post(GENERATE, json=GOOD).status_code == 200
    finally:
        for each in silent:
            each.close()
    wait_until(lambda: server.open_files <= open_before, "the connections are closed")


def rejected(call: Callable[..., Any], *arguments: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=WAIT_SECS)
    return caught.value


@pytest.mark.parametrize("data", [b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0fx", b"\x0a\x02\xff\xfe"])
@pytest.mark.parametrize("method", [INFER, "/inference.GRPCInferenceService/ModelReady"])
def test_a_grpc_message_that_is_no_message_is_refused(
    channel: grpc.Channel, check: Check, method: str, data: bytes
) -> None:
    error = rejected(channel.unary_unary(method), data)
    assert (error.code().name, check(error.details())) == ("INTERNAL", "Unable to parse request")


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v2/models/{}/infer", {"inputs": []}, "' is not found"),
        ("/v2/models/repeat/versions/{}/ready", None, "failed to get model version"),
        (
            "/v2/models/echo_bytes/infer",
            {"inputs": [{"name": "{}", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
            "but missing required input(s) ['INPUT']",
        ),
    ],
)
def test_an_error_over_http_repeats_a_long_text_in_part_and_says_the_rest(
    http: httpx.Client, check: Check, path: str, body: dict[str, Any] | None, text: str
) -> None:
    long = "9" * 50_000
    url, content = path.replace("{}", long), json.dumps(body).replace("{}", long)
    answer = http.get(url) if body is None else http.post(url, content=content)
    assert 400 <= answer.status_code < 500
    message = error_of(answer, check)
    assert text in message
    assert long[:1000] in message
    assert len(message) < 5000


@pytest.mark.parametrize("character", ["a", "\n", "\u00e4", "\U0001f600"])
def test_an_error_that_repeats_a_long_name_still_reaches_the_client(
    channel: grpc.Channel, character: str
) -> None:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    error = rejected(stub.ModelMetadata, service_pb2.ModelMetadataRequest(name=20_000 * character))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert (error.details() or "").startswith("Request for unknown model: '")


def test_a_message_that_is_no_message_ends_its_stream(channel: grpc.Channel, check: Check) -> None:
    def read(timeout: float) -> None:
        list(channel.stream_stream(STREAM_INFER)(iter([b"\xff" * 10]), timeout=timeout))

    error = rejected(read)
    assert (error.code().name, check(error.details())) == ("INTERNAL", "Unable to parse request")


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ("matrix", [2**62, 2**62], "byte size for tensor 'INPUT' exceeds maximum size of"),
        ("matrix", [2**63 - 1, 1], "byte size for tensor 'INPUT' exceeds maximum size of"),
        ("matrix", [2**40, 1], "input byte size mismatch for input 'INPUT'"),
        ("matrix", [-1, 1], "All input dimensions should be specified for input 'INPUT'"),
        ("matrix", [-(2**63), 1], "tensor 'INPUT' contains an invalid dimension"),
        ("matrix", [1] * 1000, "unexpected shape for input 'INPUT'"),
        ("batched", [2**62, 16], "inference request batch-size must be <= 8"),
        ("echo_bytes", [2**62], "expected 4611686018427387904 string elements"),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_a_shape_that_no_tensor_has_is_refused(
    channel: grpc.Channel, check: Check, model: str, shape: list[int], message: str, raw: bool
) -> None:
    datatype = "BYTES" if model == "echo_bytes" else "FP32"
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="INPUT", datatype=datatype, shape=shape)
    if raw:
        request.raw_input_contents.append(b"\x00" * 4)
    elif datatype == "BYTES":
        tensor.contents.bytes_contents.append(b"x")
    else:
        tensor.contents.fp32_contents.append(0)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    error = rejected(stub.ModelInfer, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in check(error.details())


def test_random_grpc_messages_are_answered_or_refused(channel: grpc.Channel, check: Check) -> None:
    good = service_pb2.ModelInferRequest(model_name="single", id="x")
    good.inputs.add(name="INPUT", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    good.parameters["a"].int64_param = 1
    data = good.SerializeToString()
    source = random.Random(1)
    call = channel.unary_unary(INFER)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(source.randint(1, 3)):
            changed[source.randrange(len(changed))] = source.randrange(256)
        answer = call.future(bytes(changed), timeout=WAIT_SECS)
        check(answer.details() or "")
        assert answer.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request_headers(method: str) -> bytes:
    """The headers of a gRPC call, in literal HPACK fields."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    parts = [b"\x00" + hpack(name) + hpack(value) for name, value in fields.items()]
    return b"".join(parts)


def hpack(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


SETTINGS, HEADERS, DATA = 4, 1, 0
END_HEADERS, END_STREAM = 4, 1


@pytest.mark.parametrize("method", [INFER, STREAM_INFER])
@pytest.mark.parametrize("announced", [100, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("ends", [True, False])
def test_a_grpc_message_shorter_than_announced_holds_nothing(
    server: Serving, method: str, announced: int, ends: bool
) -> None:
    before, open_before = server.resident_bytes, server.open_files
    message = b"\x00" + struct.pack(">I", announced) + b"short"
    with Connection(server.ports["grpc"]) as connection:
        connection.send(
            PREFACE
            + frame(SETTINGS, 0, 0, b"")
            + frame(HEADERS, END_HEADERS, 1, request_headers(method))
            + frame(DATA, END_STREAM if ends else 0, 1, message)
        )
        assert connection.read(9)
    wait_until(lambda: server.open_files <= open_before, "the connection is closed")
    assert server.resident_bytes - before < ALLOWED_GROWTH


def test_a_grpc_client_may_vanish_in_the_middle_of_a_message(server: Serving) -> None:
    for _ in range(ROUNDS):
        with Connection(server.ports["grpc"]) as connection:
            connection.send(
                PREFACE
                + frame(SETTINGS, 0, 0, b"")
                + frame(HEADERS, END_HEADERS, 1, request_headers(STREAM_INFER))
                + frame(DATA, 0, 1, b"\x00\x00\x00\x10\x00" + b"x" * 100)
            )
            connection.reset()


def test_a_get_on_the_metrics_port_is_all_it_answers(server: Serving) -> None:
    with Connection(server.ports["metrics"]) as connection:
        connection.send(post("/metrics", b"x" * 1000))
        assert connection.answer().status == 405
        connection.send(get("/metrics"))
        assert connection.answer().status == 200


def test_floods_leave_the_memory_where_it_was(server: Serving, http: httpx.Client) -> None:
    def flood() -> None:
        for _ in range(ROUNDS):
            assert http.post(GENERATE, content=b" " * (MAX_BODY + 1)).status_code == 400
            assert http.post(GENERATE, content=b"[" * MAX_BODY).status_code == 500
            too_large_head(server, head_of("one header", 1_000_000))

    flood()
    before = server.resident_bytes
    flood()
    assert server.resident_bytes - before < ALLOWED_GROWTH
