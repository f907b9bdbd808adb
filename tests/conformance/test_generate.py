"""generate and generate_stream in literal bytes: framing, order of keys, headers, errors."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.conformance.models import DATATYPES
from tests.raw import Connection, get, post
from tests.serving import Serving

pytestmark = pytest.mark.runs_on("frontends")

FIRST_RESPONSE_SECS = 0.3
KEEP_ALIVE_SECS = 0.2
FLAGS = (
    f"--http-first-response-secs={FIRST_RESPONSE_SECS}",
    f"--http-keep-alive-secs={KEEP_ALIVE_SECS}",
)
NOT_ONE = (
    b'{"error":"generate expects model to produce exactly 1 response, use generate stream for '
    b'model that generates various number of responses"}'
)
REPEATED = b'{"model_name":"repeat","model_version":"1","text_output":"x"}'
EVENT = b"data: " + REPEATED + b"\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
UNFITTING = "The schema can not convert input 'INPUT' to tensor with proper shape"
MISSING = (
    "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'single'. Got "
    "input(s) [], but missing required input(s) ['INPUT']. Please provide all required input(s)."
)


def repeat(count: int, text: str = "x", **more: Any) -> dict[str, Any]:
    return {"text_input": text, "n": count, **more}


def ask(endpoint: str, body: dict[str, Any], *headers: str) -> bytes:
    return post(f"/v2/models/repeat/{endpoint}", json.dumps(body).encode(), *headers)


def test_generate_answers_one_json_object_with_its_keys_sorted(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/models/repeat/generate", repeat(1))
        answer = connection.answer()
    assert (answer.status, answer.body) == (200, REPEATED)
    assert answer.headers == {
        "content-length": str(len(REPEATED)),
        "content-type": "application/json",
    }


def test_a_stream_is_events_of_one_line_and_ends_with_the_body(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/models/repeat/generate_stream", repeat(3))
        answer = connection.answer()
    assert (answer.status, answer.body) == (200, EVENT * 3)
    assert answer.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "transfer-encoding": "chunked",
        "cache-control": "no-store",
        "connection": "keep-alive",
        "x-accel-buffering": "no",
    }


@pytest.mark.parametrize("model", ["repeat", "repeat/versions/1"])
@pytest.mark.parametrize(("count", "body"), [(0, NOT_ONE), (1, REPEATED), (3, NOT_ONE)])
def test_generate_answers_exactly_one_response(
    http: httpx.Client, model: str, count: int, body: bytes
) -> None:
    answer = http.post(f"/v2/models/{model}/generate", json=repeat(count))
    assert (answer.status_code, answer.content) == (200, body)


@pytest.mark.parametrize("model", ["repeat", "repeat/versions/1"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stream_has_one_event_per_response(http: httpx.Client, model: str, count: int) -> None:
    answer = http.post(f"/v2/models/{model}/generate_stream", json=repeat(count))
    assert (answer.status_code, answer.content) == (200, EVENT * count)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_a_model_that_is_not_decoupled_streams_one_event(http: httpx.Client) -> None:
    answer = http.post("/v2/models/single/generate_stream", json={"INPUT": "x"})
    assert answer.content == b'data: {"OUTPUT":"x","model_name":"single","model_version":"1"}\n\n'


def test_a_final_flag_without_data_is_no_event(http: httpx.Client) -> None:
    answer = http.post("/v2/models/flagged/generate_stream", json={"text_input": "x"})
    assert texts_of(answer.content) == ["one", "two"]


def test_a_trailing_flag_does_not_count_as_a_second_response(http: httpx.Client) -> None:
    answer = http.post("/v2/models/three/generate", json={"INPUT": "x"})
    assert answer.content == NOT_ONE
    answer = http.post("/v2/models/silent/generate", json={"text_input": "x"})
    assert (answer.status_code, answer.content) == (200, NOT_ONE)


def test_every_response_leaves_at_once(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/models/repeat/generate_stream", repeat(3, delay_us=50_000))
        connection.head()
        chunks = list(iter(connection.chunk, b""))
    assert chunks == [EVENT] * 3


def test_responses_of_one_moment_leave_together(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/models/repeat/generate_stream", repeat(2000))
        connection.head()
        chunks = list(iter(connection.chunk, b""))
    assert b"".join(chunks) == EVENT * 2000
    assert len(chunks) < 200


@pytest.mark.parametrize("wanted", ["abc", "123", "ÄÖ ✓"])
def test_an_id_is_echoed(http: httpx.Client, wanted: str) -> None:
    answer = http.post("/v2/models/repeat/generate", json=repeat(1, id=wanted))
    shown = json.dumps(wanted, ensure_ascii=False)
    assert answer.text == f'{{"id":{shown},"model_name":"repeat",' + REPEATED.decode()[23:]
    events = http.post("/v2/models/repeat/generate_stream", json=repeat(2, id=wanted))
    assert [event["id"] for event in events_of(events.content)] == [wanted, wanted]


def test_an_empty_id_is_no_id(http: httpx.Client) -> None:
    answer = http.post("/v2/models/repeat/generate", json=repeat(1, id=""))
    assert answer.content == REPEATED


@pytest.mark.parametrize(
    "parameters",
    [
        {"a": 1, "b": -(2**63), "c": 2**63},
        {"a": 0.5, "b": 1e300},
        {"a": "text", "b": ""},
        {"a": True, "b": False},
        {"priority": 1, "timeout": 2, "sequence_id": 3, "stream": True, "triton_x": "y"},
        {"parameters": {"a": 1, "b": 0.5, "c": "text", "d": True}},
        {"parameters": {}},
    ],
)
def test_parameters_may_be_numbers_strings_and_booleans(
    http: httpx.Client, parameters: dict[str, Any]
) -> None:
    answer = http.post("/v2/models/repeat/generate", json=repeat(1, **parameters))
    assert (answer.status_code, answer.content) == (200, REPEATED)


def test_inputs_may_be_inside_parameters(http: httpx.Client) -> None:
    body = {"text_input": "x", "parameters": {"n": 2}}
    answer = http.post("/v2/models/repeat/generate_stream", json=body)
    assert answer.content == EVENT * 2


def test_the_parameters_of_a_response_are_at_its_top_level(http: httpx.Client) -> None:
    answer = http.post("/v2/models/annotated/generate", json={"text_input": "x", "id": "i"})
    assert answer.text == (
        '{"id":"i","model_name":"annotated","model_version":"1","n":2,"ok":true,"s":"x",'
        '"score":0.5,"text_output":"a"}'
    )


@pytest.mark.parametrize(
    ("model", "value", "shown"),
    [
        ("single", "hi", "hi"),
        ("single", ["hi"], "hi"),
        ("batched_text", "hi", "hi"),
        ("batched_text", ["hi"], "hi"),
        ("batched_text", ["a", "b"], ["a", "b"]),
        ("matrix", [1, 2, 3], [1.0, 2.0, 3.0]),
        ("echo_fp32", 5, 5.0),
        ("echo_fp32", [5], 5.0),
        ("echo_fp32", [5, 6.5], [5.0, 6.5]),
        ("echo_fp32", [], []),
        ("batched", list(range(32)), [float(value) for value in range(32)]),
        ("sixteen", list(range(16)), [float(value) for value in range(16)]),
    ],
)
def test_a_value_becomes_a_tensor_of_the_models_shape(
    http: httpx.Client, model: str, value: Any, shown: Any
) -> None:
    answer = http.post(f"/v2/models/{model}/generate", json={"INPUT": value})
    assert (answer.status_code, answer.json().get("OUTPUT")) == (200, shown)


@pytest.mark.parametrize(
    ("model", "value"),
    [
        ("single", ["a", "b"]),
        ("batched", list(range(31))),
        ("sixteen", list(range(32))),
        ("sixteen", 1),
    ],
)
def test_a_value_that_fits_no_shape_is_refused(http: httpx.Client, model: str, value: Any) -> None:
    answer = http.post(f"/v2/models/{model}/generate", json={"INPUT": value})
    assert (answer.status_code, answer.json()) == (400, {"error": UNFITTING})


def test_a_batch_that_is_too_large_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v2/models/batched_text/generate", json={"INPUT": ["x"] * 9})
    assert (answer.status_code, answer.json()) == (
        400,
        {
            "error": "[request id: <id_unknown>] inference request batch-size must be <= 8 for "
            "'batched_text'"
        },
    )


@pytest.mark.parametrize(
    ("datatype", "values", "shown"),
    [
        ("BOOL", [True, False], [True, False]),
        ("UINT8", [0, 255], [0, 255]),
        ("UINT8", [300, 1], [44, 1]),
        ("UINT16", [0, 65535], [0, 65535]),
        ("UINT32", [0, 2**32 - 1], [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1], [0, 2**64 - 1]),
        ("INT8", [-128, 127], [-128, 127]),
        ("INT16", [-(2**15), 2**15 - 1], [-(2**15), 2**15 - 1]),
        ("INT32", [-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("FP32", [0.1, 1], [0.10000000149011612, 1.0]),
        ("FP64", [0.1, 1], [0.1, 1.0]),
        ("BYTES", ["", 'ä\n"\\'], ["", 'ä\n"\\']),
    ],
)
def test_every_datatype_of_json_is_echoed_unchanged(
    http: httpx.Client, datatype: str, values: list[Any], shown: list[Any]
) -> None:
    answer = http.post(
        f"/v2/models/echo_{datatype.lower()}/generate", content=json.dumps({"INPUT": values})
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["OUTPUT"] == shown
    assert str(answer.json()["OUTPUT"]) == str(shown)


def test_values_beyond_fp32_become_infinity_in_tritons_notation(http: httpx.Client) -> None:
    answer = http.post("/v2/models/echo_fp32/generate", json={"INPUT": [1e39, -1e39, 0]})
    assert answer.content == (
        b'{"OUTPUT":[Infinity,-Infinity,0.0],"model_name":"echo_fp32","model_version":"1"}'
    )


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_refused_in_json(http: httpx.Client, datatype: str) -> None:
    answer = http.post(f"/v2/models/echo_{datatype.lower()}/generate", json={"INPUT": [1]})
    assert (answer.status_code, answer.json()) == (
        400,
        {
            "error": f"receiving {datatype} data via JSON is not supported. Please use the binary "
            "data format for input INPUT"
        },
    )


def test_the_catalogue_has_a_model_of_every_datatype(http: httpx.Client) -> None:
    for datatype in DATATYPES:
        found = http.get(f"/v2/models/echo_{datatype.lower()}").json()
        assert found["inputs"][0]["datatype"] == datatype


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "body", "status", "message"),
    [
        ("single", {}, 400, MISSING),
        ("nope", {}, 404, "Request for unknown model: 'nope' is not found"),
        (
            "nested",
            {"INPUT": "x", "parameters": {"a": 1}},
            400,
            "Keyword 'parameters' for nested schema also given as input tensor name",
        ),
        (
            "single",
            {"INPUT": "x", "parameters": {"a": None}},
            400,
            "Converting keyword: 'parameters': parameter 'a' has invalid type. It should be "
            "either 'int', 'bool', or 'string'.",
        ),
    ],
)
def test_what_is_refused_before_it_is_queued_is_plain_json(
    http: httpx.Client,
    endpoint: str,
    model: str,
    body: dict[str, Any],
    status: int,
    message: str,
) -> None:
    answer = http.post(f"/v2/models/{model}/{endpoint}", json=body)
    expected = json.dumps({"error": message}, separators=(",", ":")).encode()
    assert (answer.status_code, answer.content) == (status, expected)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(expected))


FRAMES = {
    "generate": ("application/json", b"%b"),
    "generate_stream": ("text/event-stream; charset=utf-8", b"data: %b\n\n"),
}
"""An answer as each endpoint writes it."""


@pytest.mark.parametrize("endpoint", FRAMES)
@pytest.mark.parametrize(
    ("model", "body", "status", "message"),
    [
        ("failing", {"INPUT": "x"}, 500, "the model says no"),
        ("failing_stream", {"INPUT": "x"}, 500, "the model says no"),
        ("unavailable", {"text_input": "x"}, 503, "come back later"),
        ("repeat", repeat(-1), 400, "'n' is -1, expected >= 0"),
        (
            "crashing",
            {"text_input": "x"},
            500,
            "model 'crashing' failed unexpectedly; the server's log says why",
        ),
    ],
)
def test_an_error_of_the_model_that_comes_first_has_its_own_status_and_is_framed_as_an_answer(
    http: httpx.Client,
    endpoint: str,
    model: str,
    body: dict[str, Any],
    status: int,
    message: str,
) -> None:
    """A real Triton 2.51 frames it so; its status is 400 for every code."""
    answer = http.post(f"/v2/models/{model}/{endpoint}", json=body)
    type_, frame = FRAMES[endpoint]
    expected = frame % json.dumps({"error": message}, separators=(",", ":")).encode()
    assert (answer.status_code, answer.content) == (status, expected)
    assert answer.headers["content-type"] == type_
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)


def test_an_error_second_is_one_last_event(http: httpx.Client) -> None:
    answer = http.post("/v2/models/second_error/generate_stream", json={"text_input": "x"})
    assert answer.status_code == 200
    one = b'data: {"model_name":"second_error","model_version":"1","text_output":"one"}\n\n'
    assert answer.content == one + b'data: {"error":"and then it broke"}\n\n'


def test_a_crash_after_the_first_response_is_an_event_without_its_cause(
    http: httpx.Client,
) -> None:
    answer = http.post("/v2/models/crashing_stream/generate_stream", json={"text_input": "x"})
    assert answer.content.endswith(
        b"data: {\"error\":\"model 'crashing_stream' failed unexpectedly; the server's log says "
        b'why"}\n\n'
    )


def test_headers_wait_for_the_first_response_but_not_for_long(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        began = time.monotonic()
        connection.ask("/v2/models/slow_start/generate_stream", {"text_input": "x"})
        assert connection.head().status == 200
        assert FIRST_RESPONSE_SECS <= time.monotonic() - began < 2.0
        body = b"".join(iter(connection.chunk, b""))
    assert texts_of(body) == ["late"]


def test_silence_is_filled_with_comments(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/models/slow_start/generate_stream", {"text_input": "x"})
        connection.head()
        chunks = list(iter(connection.chunk, b""))
    assert chunks[0] == KEEP_ALIVE
    assert set(chunks[:-1]) == {KEEP_ALIVE}
    assert chunks[-1].startswith(b"data: ")


def test_an_error_after_the_headers_is_an_event_though_nothing_came_before(
    http: httpx.Client,
) -> None:
    answer = http.post("/v2/models/late_error/generate_stream", json={"text_input": "x"})
    assert answer.status_code == 200
    assert answer.content.replace(KEEP_ALIVE, b"") == b'data: {"error":"too late"}\n\n'


def test_an_error_that_comes_late_keeps_its_status_on_generate(http: httpx.Client) -> None:
    answer = http.post("/v2/models/late_error/generate", json={"text_input": "x"})
    assert (answer.status_code, answer.content) == (500, b'{"error":"too late"}')


def test_pipelined_requests_are_answered_in_their_order(server: Serving) -> None:
    slow = post(
        "/v2/models/repeat/generate", json.dumps(repeat(1, "slow", delay_us=200_000)).encode()
    )
    fast = post("/v2/models/repeat/generate", json.dumps(repeat(1, "fast")).encode())
    stream = post("/v2/models/repeat/generate_stream", json.dumps(repeat(2)).encode())
    with Connection(server.ports["http"]) as connection:
        connection.send(slow + fast + stream + get("/v2/health/live"))
        answers = [connection.answer() for _ in range(4)]
    assert [answer.json["text_output"] for answer in answers[:2]] == ["slow", "fast"]
    assert answers[2].body == EVENT * 2
    assert answers[3].status == 200


def test_a_connection_serves_a_thousand_small_pipelined_requests(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.send(get("/v2/health/live", "X-Padding: " + "x" * 100) * 1000)
        assert {connection.answer().status for _ in range(1000)} == {200}


def test_a_connection_is_kept_after_an_error(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        for _ in range(3):
            connection.ask("/v2/models/failing/generate", {"INPUT": "x"})
            assert connection.answer().status == 500
            connection.ask("/v2/models/repeat/generate", repeat(1))
            assert connection.answer().body == REPEATED


def test_a_request_may_arrive_byte_by_byte(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.socket.setsockopt(6, 1, 1)  # TCP_NODELAY
        for byte in ask("generate", repeat(1)):
            connection.send(bytes([byte]))
        assert connection.answer().body == REPEATED


def test_a_chunked_body_is_accepted(server: Serving) -> None:
    head = b"POST /v2/models/repeat/generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = json.dumps(repeat(1)).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with Connection(server.ports["http"]) as connection:
        connection.send(head + chunks)
        assert connection.answer().body == REPEATED


def test_expect_continue_is_answered_before_the_body_is_sent(server: Serving) -> None:
    request = post(
        "/v2/models/repeat/generate", json.dumps(repeat(1)).encode(), "Expect: 100-continue"
    )
    head, _, body = request.partition(b"\r\n\r\n")
    with Connection(server.ports["http"]) as connection:
        connection.send(head + b"\r\n\r\n")
        assert connection.line() == b"HTTP/1.1 100 Continue\r\n"
        assert connection.line() == b"\r\n"
        connection.send(body)
        assert connection.answer().body == REPEATED


def test_http_1_0_is_answered_and_closed(server: Serving) -> None:
    request = ask("generate", repeat(1)).replace(b"HTTP/1.1", b"HTTP/1.0")
    with Connection(server.ports["http"]) as connection:
        connection.send(request)
        assert connection.answer().body == REPEATED
        assert connection.ended


def test_a_post_without_length_and_body_is_an_empty_body(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.send(b"POST /v2/models/repeat/generate HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = connection.answer()
    assert answer.status == 500
    assert answer.body == (
        b'{"error":"failed to parse the request JSON buffer: The document is empty. at 0"}'
    )


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_an_encoded_body_is_refused(http: httpx.Client, endpoint: str, encoding: str) -> None:
    answer = http.post(
        f"/v2/models/repeat/{endpoint}", content=b"x", headers={"Content-Encoding": encoding}
    )
    assert (answer.status_code, answer.json()) == (
        400,
        {"error": "Unsupported content-encoding, only 'identity' is supported."},
    )


def test_the_identity_encoding_is_none(http: httpx.Client) -> None:
    headers = {"Content-Encoding": "identity", "Accept-Encoding": "gzip, deflate, br"}
    answer = http.post("/v2/models/repeat/generate", json=repeat(1), headers=headers)
    assert answer.content == REPEATED
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize(
    "content_type",
    [
        *("text/plain", "application/x-www-form-urlencoded", "application/octet-stream"),
        *("multipart/form-data", "nonsense", ""),
    ],
)
def test_the_content_type_is_never_examined(http: httpx.Client, content_type: str) -> None:
    content = json.dumps(repeat(1)).encode()
    headers = {"Content-Type": content_type}
    answer = http.post("/v2/models/repeat/generate", content=content, headers=headers)
    assert answer.content == REPEATED


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_only_post_is_allowed(http: httpx.Client, endpoint: str, method: str) -> None:
    answer = http.request(method, f"/v2/models/repeat/{endpoint}")
    assert (answer.status_code, answer.content) == (405, b'{"error":"Method Not Allowed"}')


@pytest.mark.parametrize(
    "path",
    [
        *("/v2/models/repeat/generate/", "/v2/models/repeat/Generate", "/v2/models//generate"),
        *("/v2/models/repeat/versions/x/generate", "/v2/generate"),
    ],
)
def test_a_path_that_is_nearly_right_is_not_found(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=repeat(1))
    assert (answer.status_code, answer.content) == (404, b'{"error":"Not Found"}')


def test_a_client_that_would_upgrade_is_served_in_http_1_1(server: Serving) -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with Connection(server.ports["http"]) as connection:
        for _ in range(2):
            connection.ask("/v2/models/repeat/generate", repeat(1), *upgrade)
            assert connection.answer().body == REPEATED
        connection.send(get("/v2/health/live", *upgrade))
        assert connection.answer().status == 200
        connection.ask("/v2/models/repeat/generate", repeat(1))
        assert connection.answer().body == REPEATED


@pytest.mark.parametrize("cut", range(12))
def test_a_header_upgrade_in_two_reads_does_not_take_the_body(server: Serving, cut: int) -> None:
    """The first read ends with `cut` bytes of the end of a line and the name."""
    data = post(
        "/v2/models/repeat/generate",
        json.dumps(repeat(1)).encode(),
        *("Content-Type: application/json", "Connection: Upgrade", "Upgrade: h2c"),
    )
    at = data.index(b"\r\nUpgrade:") + cut
    with Connection(server.ports["http"]) as connection:
        connection.send(data[:at])
        connection.wait_taken()
        connection.send(data[at:])
        assert connection.answer().body == REPEATED


def events_of(body: bytes) -> list[Any]:
    """The data of each event; comments are left out."""
    blocks = body.decode().split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block[:5] == "data:"]


def texts_of(body: bytes) -> list[str]:
    return [event["text_output"] for event in events_of(body)]
