"""At a model's limit of requests in flight everything is answered, beyond it refused at once."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import httpx
import pytest

from tests.leaving import IN_FLIGHT, accepted
from tests.raw import Connection
from tests.rpc import connected, infer_request, streaming
from tests.serving import Serving

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

LIMIT = 2
AT_ONCE_SECS = 5
MESSAGE = (
    "model '{}' has 2 requests in flight, the most it accepts (its parameter 'max_in_flight'); "
    "retry later"
)
LONG = {"text_input": "x", "n": 100_000, "delay_us": 10_000}
GOOD = {"text_input": "x", "n": 1}


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


def occupy_over_http(server: Serving, stack: ExitStack) -> None:
    connection = stack.enter_context(Connection(server.ports["http"]))
    connection.ask("/v2/models/two_at_once/generate_stream", LONG)


def occupy_over_grpc(server: Serving, stack: ExitStack) -> None:
    stub = stack.enter_context(connected(server.grpc))
    rpc = stack.enter_context(streaming(stub))
    rpc.ask(infer_request("two_at_once", **LONG))


OCCUPANTS = [
    (occupy_over_http, occupy_over_http),
    (occupy_over_http, occupy_over_grpc),
    (occupy_over_grpc, occupy_over_grpc),
]


@contextmanager
def full(server: Serving, occupants: Any = OCCUPANTS[1]) -> Iterator[None]:
    """In this block the model has as many requests as it accepts."""
    with ExitStack() as stack:
        for occupy in occupants:
            with accepted(server, "two_at_once"):
                occupy(server, stack)
        assert server.metric(IN_FLIGHT, "two_at_once") == LIMIT
        yield
    server.wait_metric(IN_FLIGHT, "two_at_once", 0)


@pytest.mark.own_models("the limit of one process")
@pytest.mark.parametrize("occupants", OCCUPANTS)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_one_too_many_is_refused_at_once_over_http(
    server: Serving, http: httpx.Client, endpoint: str, occupants: Any
) -> None:
    with full(server, occupants):
        began = time.monotonic()
        answer = http.post(f"/v2/models/two_at_once/{endpoint}", json=GOOD)
        assert time.monotonic() - began < AT_ONCE_SECS
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json() == {"error": MESSAGE.format("two_at_once")}
    again = http.post(f"/v2/models/two_at_once/{endpoint}", json=GOOD)
    assert (again.status_code, '"text_output":"x"' in again.text) == (200, True)


@pytest.mark.own_models("the limit of one process")
@pytest.mark.parametrize("occupants", OCCUPANTS)
def test_one_too_many_is_refused_at_once_on_a_grpc_stream(
    server: Serving, stub: Any, occupants: Any
) -> None:
    with streaming(stub) as rpc:
        with full(server, occupants):
            began = time.monotonic()
            rpc.ask(infer_request("two_at_once", "late", **GOOD))
            found = rpc.answer()
            assert time.monotonic() - began < AT_ONCE_SECS
        assert found.error_message == MESSAGE.format("two_at_once")
        assert found.infer_response.id == "late"
        rpc.ask(infer_request("two_at_once", "again", **GOOD))
        (answer,) = rpc.rest()
        assert (answer.error_message, answer.infer_response.id) == ("", "again")


@pytest.mark.own_models("the limit of one process")
def test_one_too_many_is_refused_at_once_over_grpc(server: Serving, stub: Any) -> None:
    request = infer_request("two_single", INPUT="x")
    calls = []
    for _ in range(LIMIT):
        with accepted(server, "two_single"):
            calls.append(stub.ModelInfer.future(request))
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request, timeout=AT_ONCE_SECS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == MESSAGE.format("two_single")
    calls.pop().cancel()
    server.wait_metric(IN_FLIGHT, "two_single", LIMIT - 1)
    with accepted(server, "two_single"):
        calls.append(stub.ModelInfer.future(request))
    for call in calls:
        call.cancel()
    server.wait_metric(IN_FLIGHT, "two_single", 0)


@pytest.mark.own_models("the queue")
def test_the_queue_counts_towards_the_limit(server: Serving, http: httpx.Client) -> None:
    with ExitStack() as stack:
        for _ in range(LIMIT):
            connection = stack.enter_context(Connection(server.ports["http"]))
            with accepted(server, "two_single"):
                connection.ask("/v2/models/two_single/generate", {"INPUT": "x"})
        assert server.metric("nv_inference_pending_request_count", "two_single") == 1
        assert http.post("/v2/models/two_single/generate", json={"INPUT": "x"}).status_code == 503
    server.wait_metric(IN_FLIGHT, "two_single", 0)


def test_one_model_at_its_limit_leaves_the_others_alone(
    server: Serving, http: httpx.Client
) -> None:
    with full(server):
        answer = http.post("/v2/models/repeat/generate", json=GOOD)
        assert answer.status_code == 200
        assert http.get("/v2/health/ready").status_code == 200
        assert http.get("/v2/models/two_at_once/ready").status_code == 200


@pytest.mark.own_models("the limit of one process")
def test_a_flood_of_refusals_is_counted_and_reaches_no_instance(
    server: Serving, http: httpx.Client
) -> None:
    rejected = server.metric("nv_inference_request_failure", "two_at_once", reason="REJECTED")
    executed = server.metric("nv_inference_exec_count", "two_at_once")
    with full(server):
        statuses = {
            http.post("/v2/models/two_at_once/generate", json=GOOD).status_code for _ in range(100)
        }
        assert statuses == {503}
        assert server.metric(IN_FLIGHT, "two_at_once") == LIMIT
        assert server.metric("nv_inference_exec_count", "two_at_once") == executed
    now = server.metric("nv_inference_request_failure", "two_at_once", reason="REJECTED")
    assert now == rejected + 100


def test_what_is_wrong_with_a_request_matters_more_than_the_limit(
    server: Serving, http: httpx.Client
) -> None:
    with full(server):
        answer = http.post("/v2/models/two_at_once/generate", json={"text_input": "x"})
    assert answer.status_code == 400
