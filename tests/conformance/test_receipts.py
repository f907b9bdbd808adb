"""Receipts of requests on every wire, compared with the clock of their client."""

import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hyperframe.frame import DataFrame
from tritonclient.grpc import service_pb2

from tests.http2 import Connection as Http2
from tests.http2 import message, request
from tests.raw import Answer, Connection
from tests.raw import post as written
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving

INFER = "/inference.GRPCInferenceService/ModelInfer"
WISH = ("x-want-timing", "1")
HEADER = ": ".join(WISH)
ECHO = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
PART = re.compile(r"([a-z_]+);dur=([0-9.]+)")
ROUNDS = 40
"""Rounds of five requests each."""
LEAST_MS, LEAST_SHARE = 1.0, 0.01
NEAR, TRIES = 0.99, 40
PAUSE_SECS = 0.1
SLOW_SECS = 1.0
"""Half of it is enough to fill the buffers of the sockets on a busy machine."""


def read_header(text: str) -> dict[str, float]:
    return {name: float(ms) for name, ms in PART.findall(text)}


def last_event(body: bytes) -> Any:
    events = [each for each in body.split(b"\n\n") if each.startswith(b"data: {")]
    return json.loads(events[-1].removeprefix(b"data: "))


def check_sum(parts: dict[str, Any]) -> None:
    found = {name: ms for name, ms in parts.items() if isinstance(ms, float | int)}
    total = found.pop("total")
    assert round(sum(found.values()), 3) == total


@pytest.fixture(scope="module")
def connection(server: Serving) -> Iterator[Connection]:
    with Connection(server.ports["http"]) as found:
        yield found


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc, ready=True) as found:
        yield found


def echo(request_id: str = "") -> Any:
    found = service_pb2.ModelInferRequest(model_name="echo_fp32", id=request_id)
    found.inputs.add(name="INPUT", datatype="FP32", shape=[2])
    found.raw_input_contents.append(struct.pack("<2f", 1, 2))
    return found


class Rpcs:
    """ModelInfer on frames of its own: the threads of a client library take a millisecond."""

    def __init__(self, connection: Http2) -> None:
        self._connection = connection
        self._stream = -1
        self._sent = message(echo().SerializeToString())

    def infer(self) -> dict[str, float]:
        """The receipt of a request."""
        self._stream += 2
        head = self._connection.headers(self._stream, request(INFER, WISH))
        body = DataFrame(self._stream, self._sent, flags=["END_STREAM"])
        self._connection.send(head, body)
        text = self._connection.answer(self._stream).text("server-timing")
        assert text is not None
        return read_header(text)


@pytest.fixture(scope="module")
def rpcs(server: Serving) -> Iterator[Rpcs]:
    with Http2(server.ports["grpc"]) as found:
        yield Rpcs(found.begin())


def post(connection: Connection, path: str, body: Any, *headers: str) -> Answer:
    connection.ask(path, body, *headers)
    return connection.answer()


def infer(connection: Connection, rpcs: Rpcs) -> dict[str, float]:
    found = post(connection, "/v2/models/echo_fp32/infer", ECHO, HEADER)
    return read_header(found.headers["server-timing"])


def compressed(connection: Connection, rpcs: Rpcs) -> dict[str, float]:
    headers = HEADER, "Accept-Encoding: gzip"
    found = post(connection, "/v2/models/echo_fp32/infer", ECHO, *headers)
    return read_header(found.headers["server-timing"])


def generate(connection: Connection, rpcs: Rpcs) -> dict[str, float]:
    body = {"text_input": "x", "n": 1, "timing": True}
    found = post(connection, "/v2/models/repeat/generate", body)
    assert json.loads(found.body)["text_output"] == "x"
    return read_header(found.headers["server-timing"])


def streamed(connection: Connection, rpcs: Rpcs) -> dict[str, float]:
    body = {"text_input": "x", "n": 3, "delay_us": 3000, "timing": True}
    found = post(connection, "/v2/models/repeat/generate_stream", body)
    timing: dict[str, float] = last_event(found.body)["timing"]
    return timing


def unary(connection: Connection, rpcs: Rpcs) -> dict[str, float]:
    return rpcs.infer()


Kind = Callable[[Connection, Rpcs], dict[str, float]]
KINDS: tuple[Kind, ...] = (infer, compressed, generate, streamed, unary)


def is_near(kind: Kind, connection: Connection, rpcs: Rpcs) -> bool:
    """Whether the parts of a request add up to the time of its client."""
    since = time.perf_counter()
    parts = kind(connection, rpcs)
    took_ms = (time.perf_counter() - since) * 1000
    check_sum(parts)
    assert parts["total"] <= took_ms
    return took_ms - parts["total"] <= max(LEAST_MS, LEAST_SHARE * took_ms)


def test_the_parts_are_the_time_of_the_client(connection: Connection, rpcs: Rpcs) -> None:
    """A request is repeated if another process has delayed it, or its client."""
    near = [
        any(is_near(kind, connection, rpcs) for _ in range(TRIES))
        for _ in range(ROUNDS)
        for kind in KINDS
    ]
    assert near.count(True) >= NEAR * len(near)


@pytest.mark.parametrize("at", [10, 60, -1], ids=["in the head", "behind it", "in the body"])
def test_a_receipt_begins_with_the_first_byte(connection: Connection, at: int) -> None:
    """Also that of a request with the head of the last one, which the parser does not see."""
    body = json.dumps(ECHO).encode()
    sent = written("/v2/models/echo_fp32/infer", body, HEADER)
    at = sent.index(b"\r\n\r\n") + 4 if at == 60 else at
    for _ in range(3):
        since = time.perf_counter()
        connection.send(sent[:at])
        connection.wait_taken()
        time.sleep(PAUSE_SECS)  # the client is slow
        connection.send(sent[at:])
        parts = read_header(connection.answer().headers["server-timing"])
        took_ms = (time.perf_counter() - since) * 1000
        assert PAUSE_SECS * 500 <= parts["recv"] <= parts["total"] <= took_ms


def test_without_a_wish_no_answer_has_a_receipt(connection: Connection, stub: Any) -> None:
    asked = post(connection, "/v2/models/echo_fp32/infer", ECHO, HEADER)
    plain = post(connection, "/v2/models/echo_fp32/infer", ECHO)
    assert plain.body == asked.body
    assert {**plain.headers, "server-timing": asked.headers["server-timing"]} == asked.headers
    body = {"text_input": "x", "n": 2}
    assert b"timing" not in post(connection, "/v2/models/repeat/generate_stream", body).body
    _, call = stub.ModelInfer.with_call(echo(), timeout=WAIT_SECS)
    assert "server-timing" not in dict(call.trailing_metadata())


@pytest.mark.parametrize("count", [0, 3])
def test_the_final_response_of_model_stream_infer_has_the_receipt(stub: Any, count: int) -> None:
    """Also an empty one: without a wish it would not be sent."""
    with streaming(stub, metadata=[WISH]) as rpc:
        rpc.ask(infer_request("repeat", "a", text_input="x", n=count))
        *others, last = [each.infer_response.parameters for each in rpc.rest()]
    assert not any("timing" in each for each in others)
    check_sum(json.loads(last["timing"].string_param))


def test_a_parameter_asks_on_both_wires_and_the_model_does_not_get_it(
    connection: Connection, stub: Any
) -> None:
    body = {**ECHO, "parameters": {"timing": True}}
    found = post(connection, "/v2/models/echo_fp32/infer", body)
    check_sum(read_header(found.headers["server-timing"]))
    asked = echo()
    asked.parameters["timing"].bool_param = True
    for _ in range(3):  # the third has its message in the memo
        _, call = stub.ModelInfer.with_call(asked, timeout=WAIT_SECS)
        check_sum(read_header(dict(call.trailing_metadata())["server-timing"]))


def test_a_refusal_has_a_receipt_once_the_request_is_read(connection: Connection) -> None:
    body = {"id": "refused", "inputs": [{**ECHO["inputs"][0], "name": "OTHER"}]}
    found = post(connection, "/v2/models/echo_fp32/infer", body, HEADER)
    assert found.status == 400
    unknown = post(connection, "/v2/models/none/infer", ECHO, HEADER)
    assert (unknown.status, "server-timing" in unknown.headers) == (404, False)


def test_a_slow_client_is_a_stall(server: Serving, http: httpx.Client) -> None:
    body = {"id": "slow", "text_input": "x" * 20_000, "n": 400, "timing": True}
    with Connection(server.ports["http"], receive_buffer=4096) as slow:
        slow.ask("/v2/models/repeat/generate_stream", body)
        slow.head()
        time.sleep(SLOW_SECS)  # the client reads nothing; there is no signal of a full buffer
        timing = last_event(slow.rest())["timing"]
    check_sum(timing)
    assert timing["stall"] >= SLOW_SECS * 500
    why = http.get("/admin/why/slow").json()
    assert re.search(r"it waited for the client, which read slowly\.$", why["why"][0])


def test_the_account_of_an_ended_request_names_its_wait(
    connection: Connection, http: httpx.Client, stub: Any
) -> None:
    stub.ModelInfer(echo("of/grpc"), timeout=WAIT_SECS, metadata=[WISH])
    post(connection, "/v2/models/echo_fp32/infer", {**ECHO, "id": "of http"}, HEADER)
    for name in ("of/grpc", "of http"):
        found = http.get(f"/admin/why/{name}").json()
        assert (found["id"], found["model"], found["status"]) == (name, "echo_fp32", "ok")
        assert found["batch"]["requests"] == 1
        check_sum(found["timing"])
    unknown = http.get("/admin/why/none")
    assert unknown.status_code == 404
    foreign = http.get("/admin/why/of/grpc", headers={"Origin": "http://example.com"})
    assert foreign.status_code == 403


def test_a_disconnect_ends_the_receipt(server: Serving, http: httpx.Client) -> None:
    body = {"id": "gone", "text_input": "x", "n": 100, "delay_us": 100_000, "timing": True}
    with Connection(server.ports["http"]) as client:
        client.ask("/v2/models/repeat/generate_stream", body)
        client.head()
        client.chunk()
    until = time.monotonic() + WAIT_SECS
    while (found := http.get("/admin/why/gone")).status_code == 404:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert found.json()["status"] == "cancelled"
    check_sum(found.json()["timing"])
