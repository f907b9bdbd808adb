"""Collectors of OpenTelemetry on this machine, which take OTLP over HTTP or over gRPC."""

import gzip
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from tests.serving import wait_until

PROTOBUF = "application/x-protobuf"
PATH = "/v1/traces"

Answer = Callable[[BaseHTTPRequestHandler], None]


class Collector:
    """The spans that it has got; `answer` replaces its answer to the requests that follow."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answer: Answer = taken
        self.asked = 0
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            self.resource = texts(each.resource.attributes)
            for scope in each.scope_spans:
                self.spans += scope.spans

    def trace(self, count: int, trace_id: str = "") -> list[Span]:
        """The spans of one trace, once they are that many; they are removed."""

        def found() -> list[Span]:
            spans = [each for each in self.spans if each.trace_id.hex().startswith(trace_id)]
            return spans if len(spans) >= count else []

        wait_until(lambda: bool(found()), f"{count} spans are exported")
        spans = found()
        assert len(spans) == count, [each.name for each in spans]
        assert len({each.trace_id for each in spans}) == 1
        self.spans = [each for each in self.spans if each not in spans]
        return spans


def read_spans(messages: Iterable[bytes]) -> list[Span]:
    """The spans of messages, each of which is a field `spans` of `ScopeSpans`."""
    return list(ScopeSpans.FromString(b"".join(messages)).spans)


def texts(attributes: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in attributes}


def values(span: Span) -> dict[str, Any]:
    """The attributes of a span."""
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def events(span: Span) -> list[str]:
    return [each.name for each in span.events]


def tree(spans: list[Span]) -> dict[str, list[str]]:
    """The names of spans below each span that has some."""
    names = {each.span_id: each.name for each in spans}
    found: dict[str, list[str]] = {}
    for each in spans:
        if each.parent_span_id in names:
            found.setdefault(names[each.parent_span_id], []).append(each.name)
    return {name: sorted(below) for name, below in found.items()}


def taken(handler: BaseHTTPRequestHandler) -> None:
    """The answer of a collector that has taken the spans."""
    answered(handler, 200, ExportTraceServiceResponse().SerializeToString())


def answered(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", PROTOBUF)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serve in a thread for the length of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def collector() -> Iterator[Collector]:
    """A running collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert (self.path, self.headers["Content-Type"]) == (PATH, PROTOBUF)
            answer = found.answer  # a test that sees the request may replace it
            found.asked += 1
            if answer is taken:
                found.take(ExportTraceServiceRequest.FromString(body))
            answer(self)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}{PATH}")
    with served(server):
        yield found


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """A running collector of OTLP over gRPC on a free port; it takes every span."""

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> Any:
            found.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Servicer(), server)
    found = Collector(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield found
    finally:
        server.stop(None).wait()
