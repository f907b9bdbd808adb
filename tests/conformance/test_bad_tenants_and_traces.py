"""Bad traces, collectors, deadlines and tenants: neighbours are served meanwhile."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway.policy.keys import Role, new_key
from tests.collector import Collector, answered, collector
from tests.conformance.keys import NOTICED_SECS, stored, write
from tests.conformance.models import CATALOGUE, REPEAT, identity
from tests.conformance.neighbour import Neighbour, neighbour
from tests.gateway.observability.test_traceparent import MALFORMED, VALID
from tests.leaving import IN_FLIGHT, SMALL_BUFFER
from tests.raw import Connection, post
from tests.rpc import connected, infer_request
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

KEYS = {name: new_key() for name in ("neighbour", "guest", "admin")}
INFER = "/v2/models/text/infer"
STREAM = "/v2/models/repeat/generate_stream"
BODY = json.dumps(
    {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
).encode()
ON_A_WIRE = {
    name: text
    for name, text in MALFORMED.items()
    if text.isascii() and text == text.strip() and len(text) < 1000
}
"""Malformed values that a header can have: blanks at its ends belong to no header."""
LARGE_STATE = "a=" + "x" * 65536
DEADLINE_MS = 400


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(file, text_of("neighbour", "guest"))
    return file


def text_of(*tenants: str) -> str:
    """A key file with tables of these tenants, and with the keys of all."""
    tables = [f"[tenants.{each}]\nmax_in_flight = 8" for each in tenants]
    roles = {"admin": frozenset(Role)}
    keys = [
        stored(key, name, roles=roles.get(name, frozenset({Role.INFER})))
        for name, key in KEYS.items()
    ]
    return "\n".join([*tables, *keys])


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, key_file: Path, spans: Collector
) -> Iterator[Serving]:
    """A server with tenants that traces the requests with a `traceparent`, and no other."""
    models = tmp_path_factory.mktemp("models")
    write_model(models, "text", identity("BYTES", "1"))
    write_model(models, "repeat", REPEAT)
    write_model(models, "sixteen", CATALOGUE["sixteen"])
    settings = (
        *("mode=opentelemetry", "level=TIMESTAMPS", "rate=0"),
        *(f"opentelemetry,url={spans.url}", "opentelemetry,bsp_schedule_delay=20"),
    )
    flags = [f"--trace-config={each}" for each in settings]
    flags += [f"--api-keys={key_file}", "--metrics-open=true"]
    with serving(models, *flags) as started:
        yield started
    assert "Traceback" not in started.text


@pytest.fixture(scope="module")
def bystander(server: Serving) -> Iterator[Neighbour]:
    with neighbour(server.grpc, KEYS["neighbour"][0]) as found:
        yield found


@pytest.fixture(autouse=True)
def _neighbours_are_served(bystander: Neighbour) -> Iterator[None]:
    """Each request of the neighbour succeeds during a test, and more follow."""
    bystander.served()
    yield
    served = bystander.served()
    assert served.errors == []
    assert served.answers > 0


def line(name: str = "guest") -> str:
    return f"x-api-key: {KEYS[name][0]}"


def over_http(server: Serving, *headers: str) -> tuple[int, bytes]:
    """Status and body of an infer request with these headers."""
    with Connection(server.ports["http"]) as client:
        client.send(post(INFER, BODY, line(), *headers))
        answer = client.answer()
    return answer.status, answer.body


def over_grpc(server: Serving, **metadata: str) -> None:
    given = [("x-api-key", KEYS["guest"][0]), *metadata.items()]
    with connected(server.grpc) as stub:
        stub.ModelInfer(infer_request("text", INPUT="x"), metadata=given, timeout=WAIT_SECS)


def test_malformed_traceparents_are_served_without_a_trace(
    server: Serving, spans: Collector
) -> None:
    assert len(ON_A_WIRE) >= 20
    for text in ON_A_WIRE.values():
        assert over_http(server, f"traceparent: {text}")[0] == 200
        over_grpc(server, traceparent=text)
    over_grpc(server, traceparent=VALID)
    assert len(spans.trace(3)) == 3
    assert spans.spans == []


def test_a_tracestate_of_64_kib_is_refused_on_both_wires(server: Serving) -> None:
    status, body = over_http(server, f"tracestate: {LARGE_STATE}")
    assert (status, json.loads(body)) == (
        431,
        {"error": "request line and headers exceed 65536 bytes"},
    )
    with pytest.raises(grpc.RpcError) as caught:
        over_grpc(server, traceparent=VALID, tracestate=LARGE_STATE)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the metadata are larger than the limit of 32768 bytes"


def hang(handler: BaseHTTPRequestHandler) -> None:
    """Nothing is answered until the test has its answers."""
    RELEASED.wait(WAIT_SECS)
    answered(handler, 400, b"")


RELEASED = threading.Event()


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.shutdown(socket.SHUT_RD)
    handler.connection.close()


def garbage(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"\x00\xff no HTTP at all\r\n\r\n" * 100)


def too_many(handler: BaseHTTPRequestHandler) -> None:
    answered(handler, 429, b"")


def dropped(server: Serving) -> float:
    return server.metrics()['gateway_spans_dropped_total{reason="not_taken"}']


@pytest.mark.parametrize("answer", [hang, reset, garbage, too_many])
def test_a_collector_that_fails_delays_no_request(
    server: Serving, spans: Collector, answer: Callable[[BaseHTTPRequestHandler], None]
) -> None:
    taken, asked, before = spans.answer, spans.asked, dropped(server)
    spans.answer = answer
    try:
        for _ in range(5):
            assert over_http(server, f"traceparent: {VALID}")[0] == 200
        wait_until(lambda: spans.asked > asked, "spans are sent")
        for _ in range(5):
            assert over_http(server, f"traceparent: {VALID}")[0] == 200
    finally:
        spans.answer = taken
        RELEASED.set()
    # What was not dropped is sent again, or waited.
    wait_until(
        lambda: len(spans.spans) + dropped(server) - before == 3 * 10,
        "each span is exported, or is counted as dropped",
    )
    spans.spans.clear()
    over_grpc(server, traceparent=VALID)
    assert len(spans.trace(3)) == 3


def tenant(server: Serving, name: str) -> Any:
    """The account of a tenant."""
    headers = {"x-api-key": KEYS["admin"][0]}
    rows = httpx.get(f"{server.http}/admin/tenants", headers=headers).json()["tenants"]
    return next(each for each in rows if each["tenant"] == name)


def test_a_tenant_that_is_removed_while_it_streams_gets_all_of_its_answer(
    server: Serving, key_file: Path
) -> None:
    count = 35
    try:
        with Connection(server.ports["http"]) as client:
            client.ask(STREAM, {"text_input": "x", "n": count, "delay_us": 40_000}, line())
            assert client.head().status == 200
            assert tenant(server, "guest")["in_flight"] == 1
            write(key_file, text_of("neighbour"))
            wait_until(
                lambda: "max_in_flight" not in tenant(server, "guest")["rules"],
                "its table is gone",
                NOTICED_SECS,
            )
            assert server.metric(IN_FLIGHT, "repeat") >= 1
            assert client.rest().count(b"data: ") == count
    finally:
        write(key_file, text_of("neighbour", "guest"))
    assert tenant(server, "guest")["in_flight"] == 0


def test_a_client_that_reads_nothing_behind_the_head_has_its_deadline_and_its_error_last(
    server: Serving,
) -> None:
    body = {"text_input": "x" * 4096, "n": 10**6, "deadline_ms": DEADLINE_MS}
    with Connection(server.ports["http"], receive_buffer=SMALL_BUFFER) as client:
        client.ask(STREAM, body, line())
        assert client.head().status == 200
        wait_until(lambda: tenant(server, "guest")["in_flight"] == 0, "the request has ended")
        events = client.rest().strip().split(b"\n\n")
    assert len(events) > 1
    assert all(each.startswith(b'data: {"model_name"') for each in events[:-1])
    assert events[-1].startswith(b'data: {"error":"deadline exceeded after ')
