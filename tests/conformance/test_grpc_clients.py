"""A client of gRPC that shares no code with ours, grpc-js on Node's HTTP/2, on each transport."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import GrpcTransport
from tests.interop.node import NodeRpc, call, need_client
from tests.leaving import IN_FLIGHT
from tests.serving import Serving, serving

pytestmark = pytest.mark.node

MIB = 1 << 20
UNICODE = "mödel ☺ \U0001f608 100%\n"
OK, CANCELLED, DEADLINE_EXCEEDED, NOT_FOUND, INTERNAL = 0, 1, 4, 5, 13

STUCK = pytest.mark.parametrize(
    ("method", "model"), [("ModelInfer", "stuck"), ("ModelStreamInfer", "endless")]
)


@pytest.fixture(scope="module", params=list(GrpcTransport))
def server(
    request: pytest.FixtureRequest, repository: Path, environment: dict[str, str]
) -> Iterator[Serving]:
    """A server on each transport in turn; however its clients leave, nothing fails unexpectedly."""
    need_client()
    flags = (f"--grpc-transport={request.param}", "--grpc-header-forward-pattern=^x-")
    with serving(repository, *flags, environment=environment) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]
    assert "Traceback" not in started.text


def encoded(data: bytes) -> str:
    """Bytes as they stand in JSON."""
    return base64.b64encode(data).decode()


def infer(model: str, **texts: str) -> dict[str, Any]:
    """A request with texts as inputs."""
    inputs = [
        {
            "name": name,
            "datatype": "BYTES",
            "shape": [1],
            "contents": {"bytes_contents": [encoded(text.encode())]},
        }
        for name, text in texts.items()
    ]
    return {"model_name": model, "inputs": inputs}


def repeat(count: int, delay_us: int = 0) -> dict[str, Any]:
    """A request with `count` responses."""
    request = infer("repeat", text_input="x")
    numbers = {"n": count, "delay_us": delay_us}
    for name, number in numbers.items():
        contents = {"int_contents": [number]}
        request["inputs"].append(
            {"name": name, "datatype": "INT32", "shape": [1], "contents": contents}
        )
    return request


def floats(data: bytes) -> dict[str, Any]:
    """A request whose input is echoed."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [len(data) // 4]}
    return {"model_name": "echo_fp32", "inputs": [tensor], "raw_input_contents": [encoded(data)]}


def test_an_empty_message_is_answered(server: Serving) -> None:
    found = call(server.grpc, "ServerLive", {})

    assert (found.code, found.responses) == (OK, [{"live": True}])


@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
def test_tensors_of_many_bytes_are_echoed(server: Serving, gzip: bool) -> None:
    data = bytes(range(256)) * (8 * MIB // 256)

    found = call(server.grpc, "ModelInfer", floats(data), gzip=gzip)

    assert (found.code, found.details) == (OK, "")
    assert found.responses[0]["raw_output_contents"] == [encoded(data)]


def test_an_error_has_its_code_and_its_text(server: Serving) -> None:
    found = call(server.grpc, "ModelInfer", infer(UNICODE, INPUT="x"))

    assert (found.code, found.responses) == (NOT_FOUND, [])
    assert found.details.startswith(f"Request for unknown model: '{UNICODE}'")


def test_metadata_reach_the_model(server: Serving) -> None:
    metadata = {"x-tenant": "a", "other": "b"}

    found = call(server.grpc, "ModelInfer", infer("told", text_input="x"), metadata=metadata)

    (response,) = found.responses
    assert {name: value["string_param"] for name, value in response["parameters"].items()} == {
        "x-tenant": "a"
    }


def test_responses_of_a_stream_come_in_order_and_an_error_leaves_it_open(server: Serving) -> None:
    asked = [infer("nobody", INPUT="x"), repeat(300), infer("single", INPUT="last")]

    found = call(server.grpc, "ModelStreamInfer", *asked)

    refused, *answered = found.responses
    assert (found.code, len(answered)) == (OK, 301)
    assert refused["error_message"].startswith("Request for unknown model: 'nobody'")
    assert {each["infer_response"]["model_name"] for each in answered} == {"repeat", "single"}


def test_a_strict_stream_ends_with_the_first_error(server: Serving) -> None:
    found = call(
        server.grpc,
        "ModelStreamInfer",
        infer("failing_stream", INPUT="x"),
        metadata={"triton_grpc_error": "true"},
        half_close=False,
    )

    assert (found.code, found.details) == (INTERNAL, "the model says no")


def test_a_stream_without_requests_ends_well(server: Serving) -> None:
    found = call(server.grpc, "ModelStreamInfer")

    assert (found.code, found.responses) == (OK, [])


@STUCK
def test_a_deadline_ends_the_request_on_both_sides(
    server: Serving, method: str, model: str
) -> None:
    found = call(server.grpc, method, infer(model, INPUT="x"), deadline_ms=300)

    assert found.code == DEADLINE_EXCEEDED
    server.wait_metric(IN_FLIGHT, model, 0)


@STUCK
def test_cancelling_ends_the_request(server: Serving, method: str, model: str) -> None:
    with NodeRpc(server.grpc, method, infer(model, INPUT="x"), half_close=False) as rpc:
        server.wait_metric(IN_FLIGHT, model, 1)
        rpc.cancel()

        assert rpc.outcome().code == CANCELLED
    server.wait_metric(IN_FLIGHT, model, 0)


@pytest.mark.parametrize("delay_us", [0, 1000])
def test_cancelling_between_responses_ends_the_request(server: Serving, delay_us: int) -> None:
    asked = repeat(100_000, delay_us)

    found = call(server.grpc, "ModelStreamInfer", asked, cancel_after=5, half_close=False)

    assert found.code == CANCELLED
    assert len(found.responses) >= 5
    server.wait_metric(IN_FLIGHT, "repeat", 0)


def test_a_client_that_is_killed_is_noticed(server: Serving) -> None:
    with NodeRpc(server.grpc, "ModelInfer", infer("stuck", INPUT="x")):
        server.wait_metric(IN_FLIGHT, "stuck", 1)

    server.wait_metric(IN_FLIGHT, "stuck", 0)
