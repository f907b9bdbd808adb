"""Refusals of steps, as the clients of their ensembles have them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from gateway.config.scheduling import EnsembleScheduling
from gateway.ensembles.backend import EnsembleInstance
from gateway.errors import InferenceError, Refusal, RefusalReason, RetryAdvice, RetryLater
from gateway.in_process.server import Server
from tests.builders import TEXT, read_all, soon, text_request
from tests.conformance.ensembles import calls, ensemble
from tests.conformance.models import NEVER_US, with_parameters
from tests.conftest import Serve
from tests.gateway.admission.deadline_planes import plane, samples
from tests.gateway.ensembles.chains import call, chain
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, wait_until, write_model

FULL = "in ensemble 'around', [request id: r] Exceeds maximum queue size"
SLOW = (
    'backend: "identity"\nmax_batch_size: 1\n'
    'input { name: "IN" data_type: TYPE_STRING dims: [1] }\n'
    'output { name: "OUT" data_type: TYPE_STRING dims: [1] }\n'
    "dynamic_batching { default_queue_policy { max_queue_size: 1 } }\n"
) + with_parameters({"delay_us": NEVER_US})
ADVICE = RetryAdvice(
    retry_after_secs=2.5, limit="tokens", headers={"x-ratelimit-limit-tokens": "9"}
)


@pytest.mark.parametrize(
    "error",
    [
        RetryLater("it is full", 7.0),
        Refusal(RefusalReason.RATE_LIMITED, "it is full", ADVICE),
        Refusal(RefusalReason.DEADLINE_EXCEEDED, "it is full", RetryAdvice(retries=False)),
    ],
    ids=lambda error: str(error.refusal_reason),
)
@pytest.mark.parametrize("refuses", ["a", "b"])
async def test_the_refusal_of_a_step_has_its_reason_and_its_advice(
    serve: Serve, error: Refusal, refuses: str
) -> None:
    parts = chain(serve)
    with parts.ask() as stream:
        if refuses == "b":
            (await parts["a"].begun()).finish("m")
        (await parts[refuses].begun()).answer(error)
        with pytest.raises(Refusal) as caught:
            await soon(read_all(stream))
    assert caught.value.message == "in ensemble 'e', it is full"
    assert caught.value.refusal_reason is error.refusal_reason
    assert caught.value.advice == error.advice
    assert caught.value.after_steps is (refuses == "b")


@pytest.mark.parametrize("refuses", ["a", "b"])
async def test_a_refusal_within_two_ensembles_counts_once_and_knows_of_the_steps_before(
    serve: Serve, refuses: str
) -> None:
    inner = chain(serve)
    config = replace(
        TEXT,
        name="outer",
        ensemble_scheduling=EnsembleScheduling(step=(call("e", "text_input", "text_output"),)),
    )
    outer = serve(EnsembleInstance(config, {("e", -1): inner.model}), config=config)
    dataplane = plane(outer, inner.model, *inner.models.values())
    with dataplane.infer(text_request(model="outer")) as stream:
        if refuses == "b":
            (await inner["a"].begun()).finish("m")
        (await inner[refuses].begun()).answer(RetryLater("it is full"))
        with pytest.raises(InferenceError) as caught:
            await soon(read_all(stream))
    assert caught.value.message == "in ensemble 'outer', in ensemble 'e', it is full"
    assert caught.value.after_steps is (refuses == "b")
    assert samples(dataplane) == [({"model": refuses, "version": "1", "reason": "overloaded"}, 1)]


async def test_an_ensemble_counts_the_requests_that_it_refuses_itself(serve: Serve) -> None:
    parts = chain(serve, parameters={"max_in_flight": "1"})
    dataplane = plane(parts.model, *parts.models.values())
    with dataplane.infer(text_request(model="e")), pytest.raises(RetryLater) as caught:
        dataplane.infer(text_request(model="e"))
    assert not caught.value.after_steps
    assert samples(dataplane) == [({"model": "e", "version": "1", "reason": "overloaded"}, 1)]


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with an ensemble whose member has no room."""
    models = tmp_path_factory.mktemp("refused")
    write_model(models, "slow", SLOW)
    write_model(models, "around", ensemble(calls("slow", "X", "Y"), kind="STRING 1", more=BATCHES))
    ports = {"http_port": 0, "grpc_port": 0}
    addresses = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}
    transport = {"grpc_transport": request.param}
    with (
        Server(model_repository=models, **transport, **ports, **addresses) as found,
        connected(f"127.0.0.1:{found.ports['grpc']}", ready=True) as stub,
    ):
        asked = [stub.ModelInfer.future(named("slow", "IN")) for _ in range(3)]
        wait_until(lambda: any(each.done() for each in asked), "the queue is full")
        yield found
        for each in asked:
            each.cancel()


BATCHES = "max_batch_size: 1\n"
OVER_HTTP = pytest.mark.parametrize("served", ["hyper"], indirect=True)
OVER_GRPC = pytest.mark.parametrize("served", ["hyper", "grpcio"], indirect=True)


def named(model: str, name: str) -> Any:
    request = infer_request(model, "r", **{name: "x"})
    request.inputs[0].shape[:] = [1, 1]
    return request


@pytest.fixture
def stub(served: Server) -> Iterator[Any]:
    with connected(f"127.0.0.1:{served.ports['grpc']}", ready=True) as found:
        yield found


@OVER_HTTP
@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_http_has_the_reason_and_the_time_of_a_retry(served: Server, path: str) -> None:
    tensor = {"name": "X", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}
    body = {"id": "r", "inputs": [tensor]} if path == "infer" else {"id": "r", "X": "x"}
    url = f"http://127.0.0.1:{served.ports['http']}/v2/models/around/{path}"
    answer = httpx.post(url, json=body, timeout=WAIT_SECS)
    assert (answer.status_code, answer.json()) == (503, {"error": FULL})
    found = {name: answer.headers.get(name) for name in ("x-refused-reason", "x-should-retry")}
    assert found == {"x-refused-reason": "overloaded", "x-should-retry": "true"}
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")


@OVER_GRPC
def test_grpc_has_the_messages_of_google_rpc(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(named("around", "X"), timeout=WAIT_SECS)
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, FULL)
    found = dict(error.trailing_metadata())
    assert found["grpc-retry-pushback-ms"] == "1000"
    status = status_pb2.Status.FromString(found["grpc-status-details-bin"])
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert [each.Unpack(to) for each, to in zip(status.details, (info, retry), strict=True)]
    assert info.reason == "OVERLOADED"
    assert retry.retry_delay.ToMilliseconds() == 1000


@OVER_GRPC
def test_a_stream_has_the_reason_in_its_message_and_continues(stub: Any) -> None:
    with streaming(stub) as rpc:
        for _ in range(2):
            rpc.ask(named("around", "X"))
            found = rpc.answer()
            assert found.error_message == FULL
            parameters = found.infer_response.parameters
            assert parameters["refused_reason"].string_param == "overloaded"
            assert parameters["retry_after_ms"].int64_param == 1000
