"""Texts of clients in every sink: none begins a line, ends one, or controls a terminal."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from gateway.backend import MetricReading
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.http2_wire import written_details
from gateway.frontends.http.errors import error_body, openai_form
from gateway.frontends.http.why import WhyRoutes
from gateway.messages import InferRequest
from gateway.observability.access_log import AccessLog
from gateway.observability.exposition import render
from gateway.observability.gen_ai import CONVERSATION_ID
from gateway.observability.log import formatter
from gateway.observability.receipt import receipt_of
from gateway.observability.receipt_parts import note_batch
from gateway.observability.receipts import Receipts
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import spans_of
from gateway.observability.traceparent import SpanIds
from gateway.observability.tracer import Tracer
from gateway.policy.areas import Area
from gateway.policy.audit import AuditedChange, AuditLog
from gateway.policy.caller import Caller
from gateway.settings import LogFormat, LogSettings, TraceSettings
from tests.collector import read_spans, values
from tests.gateway.observability.test_span_rows import new_queue, served, taken

TEXTS = {
    "line": "\n{}",
    "return": "\r\n",
    "null": "\0",
    "color": "\x1b[31mred",
    "c1": "\x9b31m",
    "delete": "\x7f",
    "separator": "\u2028",
    "direction": "\u202e",
    "surrogate": "\udc80",
    "pair": "\ud83d\ude00",
    "quote": '"} ,{"',
    "backslash": "\\\\u000a\\",
    "plain": "caf\u00e9 \U0001f600",
}


def shown(text: str) -> str:
    """The text as a strict parser may have it."""
    return text.encode(errors="replace").decode()


def logged(settings: LogSettings, text: str) -> str:
    record = logging.makeLogRecord(
        {"msg": f"m {text}", "name": "sluice", "levelname": "INFO", "levelno": 20}
    )
    record.field = text
    return formatter(settings).format(record) + "\n"


def text_log(text: str, folder: Path) -> str:
    return logged(LogSettings(), text)


def json_log(text: str, folder: Path) -> str:
    written = logged(LogSettings(format=LogFormat.JSON), text)
    found = orjson.loads(written)
    assert (found["field"], found["message"]) == (shown(text), f"m {shown(text)}")
    return written


def json_log_of_a_request(text: str, folder: Path) -> str:
    request = AccessLog(None).request("http", "/", "GET", "", [text])
    request.id, request.caller, request.changes = text, Caller(tenant=text), True
    with request:
        written = logged(LogSettings(format=LogFormat.JSON), text)
    found = orjson.loads(written)
    assert found["request_id"] == found["tenant"] == shown(text)
    assert found["audit"] is True
    assert "trace_id" not in found
    return written


def access_log(text: str, folder: Path) -> str:
    log = AccessLog(folder / "access")
    log.open()
    with log.request("http", "/v2", "GET", text, [text]) as request:
        request.id = request.model = text
        request.caller = Caller(tenant=text, key_id=text)
        request.status = 200
    log.close()
    written = (folder / "access").read_bytes()
    found = orjson.loads(written)
    for member in ("peer", "request_id", "model", "tenant", "key_id"):
        assert found[member] == shown(text)
    return written.decode("ascii")


def audit_log(text: str, folder: Path) -> str:
    log = AuditLog(folder / "audit")
    log.open()
    about = {"settings": {text: text}}
    log.add(AuditedChange(area=Area.LOGGING, action="settings", by="client", about=about), text)
    log.close()
    written = (folder / "audit").read_bytes()
    assert orjson.loads(written)["settings"] == {shown(text): shown(text)}
    return written.decode("ascii")


def trace_file(text: str, folder: Path) -> str:
    tracer = Tracer(TraceSettings(file=str(folder / "trace"), levels=("TIMESTAMPS",), rate=1))
    trace = tracer.begin("m")
    assert trace is not None
    trace.accepted("m", "1", InferRequest(model="m", id=text))
    trace.ended(1)
    trace.sent()
    tracer.close()
    written = (folder / "trace").read_bytes()
    found: list[dict[str, Any]] = orjson.loads(written)
    assert found[0]["request_id"] == shown(text)
    return written.decode() + "\n"


def metrics_page(text: str, folder: Path) -> str:
    reading = MetricReading("a", "help", "gauge")
    reading.add_sample("a", {"tenant": text}, 1)
    page = render([reading]).decode()
    (family,) = text_string_to_metric_families(page)
    (sample,) = family.samples
    if text.isprintable():
        assert sample.labels["tenant"] == text
    return page.split("\n", 2)[2]


def error_of_v2(text: str, folder: Path) -> str:
    body = error_body(InferenceError(Code.INVALID_ARG, text).message)
    assert orjson.loads(body) == {"error": shown(text)}
    return body.decode() + "\n"


def error_of_openai(text: str, folder: Path) -> str:
    _, body = openai_form(InferenceError(Code.INVALID_ARG, text))
    assert orjson.loads(body)["error"]["message"] == shown(text)
    return body.decode() + "\n"


def status_of_grpc(text: str, folder: Path) -> str:
    return written_details(InferenceError(Code.INVALID_ARG, text).message) + "\n"


def why(text: str, folder: Path) -> str:
    receipts = Receipts(every=True)
    asked = InferRequest(model=text, id=text)
    request = receipts.begin(asked, 1, 2, wished=True)
    neighbour = InferRequest(model=text, caller=Caller(tenant=text))
    note_batch([request, neighbour], 2)
    receipt = receipt_of(request)
    assert receipt is not None
    receipt.refused(request, InferenceError(Code.INVALID_ARG, text))
    receipt.sent()
    dataplane: Any = SimpleNamespace(receipts=receipts)
    scope = {"type": "http", "path_params": {"request_id": text}, "headers": []}
    body = asyncio.run(WhyRoutes(dataplane).why(Request(scope))).body
    found = orjson.loads(bytes(body))
    assert found["id"] == found["model"] == shown(text)
    assert found["status"] == f"refused: {shown(text)}"
    assert found["batch"]["other_tenants"] == [shown(text)]
    return bytes(body).decode() + "\n"


def spans(text: str, folder: Path) -> str:
    trace = SpanTrace(1, SpanIds(None), lambda _: None)
    trace.asked = {CONVERSATION_ID: text}
    trace.accepted("m", "1", InferRequest(model="m", id=text))
    trace.routed(text)
    trace.ended(1)
    found = [values(each) for each in read_spans(spans_of(trace))]
    names = ("triton.request_id", CONVERSATION_ID, "server.address")
    texts = [each[name] for each in found for name in names if name in each]
    assert len(texts) == len(names)
    if text.isprintable():
        assert set(texts) == {text}
    return " ".join(texts) + "\n"


def spans_of_many_requests(text: str, folder: Path) -> str:
    queue = new_queue()
    for number in range(1, 21):
        queue.keep(served(queue.ids, number, text))
    found, _ = taken(queue)
    ids = [values(each).get("triton.request_id") for each in found]
    written = {each for each in ids if each is not None}
    assert (len(written), len(ids) - ids.count(None)) == (1, 20)
    if text.isprintable():
        assert written == {text}
    return written.pop() + "\n"


SINKS = (
    *(text_log, json_log, json_log_of_a_request, access_log, audit_log, trace_file),
    *(metrics_page, error_of_v2, error_of_openai, status_of_grpc, why, spans),
    spans_of_many_requests,
)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("sink", SINKS, ids=lambda sink: sink.__name__)
def test_no_text_of_a_client_breaks_a_line_or_controls_a_terminal(
    sink: Callable[[str, Path], str], text: str, tmp_path: Path
) -> None:
    written = sink(text, tmp_path)
    assert written.encode()
    assert written.endswith("\n")
    assert written[:-1].isprintable()
