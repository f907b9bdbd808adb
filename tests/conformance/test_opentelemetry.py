"""Traces of `mode=opentelemetry` as a collector gets them, over both wires."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.observability.exposition import OPEN_CONTENT_TYPE
from tests.collector import Collector, collector, events, tree, values
from tests.conformance.clients import Client, connect
from tests.conformance.ensembles import calls, ensemble
from tests.conformance.models import DECOUPLED, identity
from tests.conformance.openai_models import contract, piece
from tests.raw import Connection
from tests.raw import post as written
from tests.rpc import connected, infer_request, streaming
from tests.scripted import installed
from tests.serving import WAIT_SECS, Serving, http_get, serving, wait_until, write_model

pytestmark = pytest.mark.own_models("the spans of executions")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "congo=t61rcWkgMzE"}
ARRIVAL = {
    True: ["HTTP_RECV_START", "HTTP_RECV_END"],
    False: ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"],
}
SENDING = {
    True: ["HTTP_SEND_START", "HTTP_SEND_END"],
    False: ["GRPC_SEND_START", "GRPC_SEND_END"],
}
OF_MODEL = ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
OF_COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
BLS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        context = request.trace().get_context()
        pb_utils.InferenceRequest(
            model_name="pipeline",
            requested_output_names=["Y"],
            inputs=[pb_utils.Tensor("X", np.array([1, 2], np.int32))],
            trace=request.trace(),
        ).exec()
        text = np.array([(context or "none").encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", text)])
"""
PAUSE_SECS = 0.1
INT32 = identity("INT32", "2").replace("INPUT", "IN").replace("OUTPUT", "OUT")
BYTES = {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    """The collector of the server."""
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, spans: Collector) -> Iterator[Serving]:
    """A server that traces the requests with a `traceparent`, and no other."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", identity("FP32", "2"))
    write_model(folder, "text", identity("BYTES", "1"))
    write_model(folder, "three", identity("BYTES", "1", responses=3) + DECOUPLED)
    write_model(folder, "failing", identity("BYTES", "1", fail="no"))
    write_model(folder, "member", INT32)
    write_model(folder, "pipeline", ensemble(calls("member", "X", "Y")))
    write_model(folder, "calling", identity("BYTES", "1").replace("identity", "python"))
    (folder / "calling" / "1" / "model.py").write_text(BLS)
    write_model(folder, "chat", contract(piece("one"), {"final": True}))
    settings = (
        *("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "triton,file=/nowhere"),
        *(f"opentelemetry,url={spans.url}", "opentelemetry,bsp_schedule_delay=20"),
        *("opentelemetry,resource=service.name=test", "opentelemetry,resource=test.key=value"),
    )
    flags = [f"--trace-config={each}" for each in settings] + ["--metrics-config=gen_ai=true"]
    environment = installed(tmp_path_factory.mktemp("backends"))
    with serving(folder, *flags, environment=environment) as started:
        yield started


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS, headers=HEADERS) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    """Each wire in turn."""
    async with connect(server, request.param) as found:
        yield found


async def test_a_request_continues_the_trace_of_its_caller(
    client: Client, spans: Collector
) -> None:
    module = tritonclient.http if client.over_http else tritonclient.grpc
    inputs = [module.InferInput("INPUT", [2], "FP32")]
    inputs[0].set_data_from_numpy(np.array([1, 2], dtype=np.float32))
    await client.call("infer", "echo", inputs, request_id="abc", headers={**HEADERS})
    found = {each.name: each for each in spans.trace(3)}
    root, model, compute = found["InferRequest"], found["echo"], found["compute"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.trace_state == HEADERS["tracestate"]
    assert (model.parent_span_id, compute.parent_span_id) == (root.span_id, model.span_id)
    way = client.over_http
    assert events(root) == [*ARRIVAL[way], "INFER_RESPONSE_COMPLETE", *SENDING[way]]
    assert events(model) == OF_MODEL
    assert events(compute) == OF_COMPUTE
    about = values(model)
    assert about.pop("triton.trace_id") > 0
    assert about == {
        "triton.model_name": "echo",
        "triton.model_version": 1,
        "triton.trace_parent_id": 0,
        "triton.request_id": "abc",
    }
    for each in found.values():
        assert each.kind == each.SPAN_KIND_SERVER
        moments = [event.time_unix_nano for event in each.events]
        assert moments == sorted(moments)
        assert each.start_time_unix_nano == moments[0] <= moments[-1] == each.end_time_unix_nano
    assert root.start_time_unix_nano <= model.start_time_unix_nano <= compute.start_time_unix_nano
    assert spans.resource["service.name"] == "test"
    assert spans.resource["test.key"] == "value"


def test_a_stream_a_failure_and_a_refusal_are_traces(http: httpx.Client, spans: Collector) -> None:
    http.post("/v2/models/three/generate_stream", json={"INPUT": "x"})
    assert len(spans.trace(3)) == 3
    http.post("/v2/models/failing/infer", json=BYTES)
    failed = {each.name: each for each in spans.trace(3)}
    assert values(failed["InferRequest"]) == {"error.type": "INTERNAL"}
    assert failed["failing"].status.code == failed["failing"].status.STATUS_CODE_ERROR
    http.post("/v2/models/text/infer", json={"inputs": []})
    (refused,) = spans.trace(1)
    assert values(refused) == {"error.type": "INVALID_ARG"}
    assert events(refused) == ARRIVAL[True]


def test_a_span_begins_and_ends_its_arrival_with_the_bytes_of_its_client(
    server: Serving, spans: Collector
) -> None:
    """As its receipt: the head comes first, the body later."""
    body = json.dumps({**BYTES, "parameters": {"timing": True}}).encode()
    headers = [f"{name}: {value}" for name, value in HEADERS.items()]
    head, _, rest = written("/v2/models/text/infer", body, *headers).partition(b"\r\n\r\n")
    with Connection(server.ports["http"]) as client:
        client.send(head[:10])
        client.wait_taken()
        time.sleep(PAUSE_SECS)
        client.send(head[10:] + b"\r\n\r\n")
        time.sleep(PAUSE_SECS)
        client.send(rest)
        timing = client.answer().headers["server-timing"]
    root = next(each for each in spans.trace(3) if each.name == "InferRequest")
    began, whole = (each.time_unix_nano for each in root.events[:2])
    took_ms = float(timing.partition("recv;dur=")[2].partition(",")[0])
    # More than the pause before the body alone.
    assert took_ms >= 1.5 * PAUSE_SECS * 1000
    assert abs((whole - began) / 1e6 - took_ms) < 0.002


def test_the_requests_of_a_stream_continue_the_trace_of_its_caller(
    server: Serving, spans: Collector
) -> None:
    metadata = list(HEADERS.items())
    with connected(server.grpc) as stub, streaming(stub, metadata=metadata) as rpc:
        for _ in range(2):
            rpc.ask(infer_request("text", INPUT="x"))
            rpc.answer()
    roots = [each for each in spans.trace(6) if each.name == "InferRequest"]
    assert [each.parent_span_id.hex() for each in roots] == [PARENT] * 2
    assert events(roots[0]) == [*ARRIVAL[False], "INFER_RESPONSE_COMPLETE", *SENDING[False]]


def test_members_are_below_the_span_of_their_model(http: httpx.Client, spans: Collector) -> None:
    answer = http.post("/v2/models/calling/infer", json=BYTES).json()
    found = spans.trace(6)
    assert tree(found) == {
        "InferRequest": ["calling"],
        "calling": ["compute", "pipeline"],
        "pipeline": ["member"],
        "member": ["compute"],
    }
    context = json.loads(answer["outputs"][0]["data"][0])
    model = next(each for each in found if each.name == "calling")
    assert context["traceparent"] == f"00-{TRACE}-{model.span_id.hex()}-01"
    assert context["tracestate"] == HEADERS["tracestate"]


def test_a_chat_has_the_attributes_of_generative_ai(http: httpx.Client, spans: Collector) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "secret"}], "stream": True}
    http.post("/v1/chat/completions", json=body | {"max_tokens": 7, "temperature": 0.5})
    found = spans.trace(3)
    model = next(each for each in found if each.name == "chat")
    assert (
        values(model).items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.stream": True,
        }.items()
    )
    assert b"secret" not in b"".join(each.SerializeToString() for each in found)


def test_the_page_in_openmetrics_names_the_trace_of_a_request(
    http: httpx.Client, server: Serving, spans: Collector
) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "x"}]}
    http.post("/v1/chat/completions", json=body)
    assert len(spans.trace(3)) == 3
    url = f"http://127.0.0.1:{server.ports['metrics']}/metrics"
    page = httpx.get(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert page.headers["content-type"] == OPEN_CONTENT_TYPE
    families = {each.name: each for each in text_string_to_metric_families(page.text)}
    family = families["gen_ai_server_request_duration_seconds"]
    found = [each for each in family.samples if each.exemplar]
    assert {each.exemplar.labels["trace_id"] for each in found} == {TRACE}
    assert {each.labels["gen_ai_operation_name"] for each in found} == {"chat"}
    plain = httpx.get(url)
    assert plain.headers["content-type"] == "text/plain; charset=utf-8"
    assert TRACE not in plain.text


def test_without_a_valid_traceparent_nothing_is_traced_at_rate_0(
    server: Serving, spans: Collector
) -> None:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as plain:
        for value in ("", HEADERS["traceparent"].upper()):
            plain.post("/v2/models/text/infer", json=BYTES, headers={"traceparent": value})
        plain.post("/v2/models/text/infer", json=BYTES, headers=HEADERS)
    assert len(spans.trace(3)) == 3
    assert spans.spans == []


def test_the_protocol_shows_the_mode_and_changes_its_rate(
    server: Serving, spans: Collector
) -> None:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as plain:
        assert plain.get("/v2/trace/setting").json() == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "0",
            "trace_count": "-1",
            "trace_mode": "opentelemetry",
            "url": spans.url,
            "bsp_max_queue_size": "2048",
            "bsp_schedule_delay": "20",
            "bsp_max_export_batch_size": "512",
            "resource": ["service.name=test", "test.key=value"],
        }
        path = "/v2/models/text/trace/setting"
        plain.post(path, json={"trace_rate": "1", "trace_count": "1", "url": "http://other"})
        for _ in range(3):
            plain.post("/v2/models/text/infer", json=BYTES)
        (root, *_) = (each for each in spans.trace(3) if each.name == "InferRequest")
        assert root.parent_span_id == b""
        plain.post(path, json={"trace_rate": None, "trace_count": None})
        assert plain.get(path).json()["trace_rate"] == "0"
    assert "setting ignored setting=triton,file mode=opentelemetry" in server.text


def test_a_collector_that_fails_changes_nothing_but_a_counter(
    http: httpx.Client, server: Serving, spans: Collector
) -> None:
    def fail(handler: Any) -> None:
        handler.send_response(500)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    taken, asked = spans.answer, spans.asked
    spans.answer = fail
    try:
        for _ in range(2):
            before = spans.asked
            assert http.post("/v2/models/text/infer", json=BYTES).status_code == 200
            wait_until(lambda: spans.asked > before, "the spans are sent")  # noqa: B023
        wait_until(lambda: "spans not exported" in server.text, "the failure is logged")
    finally:
        spans.answer = taken
    assert spans.asked > asked
    http.post("/v2/models/text/infer", json=BYTES)
    assert len(spans.trace(3)) == 3
    _, page = http_get(server.ports["metrics"], "/metrics")
    assert b'\ngateway_spans_dropped_total{reason="not_taken"} 6\n' in page
    lines = [line for line in server.log if "not exported" in line or "Failed to export" in line]
    assert len(lines) == 1, lines
    assert "code: 500" in lines[0]
