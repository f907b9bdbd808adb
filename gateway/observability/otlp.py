"""The export of traces to a collector, by OTLP over HTTP, in a thread of its own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from urllib3.exceptions import HTTPError

from gateway.json_lines import cut
from gateway.observability.otlp_wire import export_message
from gateway.observability.spans import spans_of
from gateway.observability.trace import Trace
from gateway.span_settings import SpanSettings

log = logging.getLogger("sluice.trace")

SCOPE = "triton-server"
SERVICE_NAME = "service.name"
SERVICE = "triton-inference-server"
"""Triton's name, in place of which a user may set another one."""
SPANS_OF_MODEL = 2
"""The spans of a model as the queue counts them: its own, and `compute`."""
CLOSE_SECS = 2.0
"""Time for the last spans when the server stops."""
QUIET_SECS = 60.0
"""Time between two lines of the log about a collector that takes no spans."""
REDIRECTIONS = 300
"""The first status of an answer from which nothing was taken."""
MOST_ANSWER_BYTES, MOST_ANSWER_SECS = 16 * 1024, 2.0
"""An answer of a collector that is longer, or takes longer, says nothing of its spans."""
PROTOBUF = "application/x-protobuf"
NOT_QUEUED, NOT_BUILT, NOT_TAKEN, REJECTED = "not_queued", "not_built", "not_taken", "rejected"
"""The reasons of dropped spans: the queue was full, a defect, no answer of the collector with a
status of success, and such an answer with `partial_success`."""
LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
)


class SpanExporter:
    """Keeps complete traces until its thread sends their spans; on the event loop it only appends.

    While the collector takes none the queue fills, and further traces are dropped.
    """

    def __init__(self, settings: SpanSettings) -> None:
        self._most = settings.bsp_max_queue_size
        self._batch = settings.bsp_max_export_batch_size
        self._delay = settings.bsp_schedule_delay / 1000
        own = {SERVICE_NAME: SERVICE, **dict(settings.resource)}
        self._resource = Resource.create(own).attributes
        self._exporter = OTLPSpanExporter(settings.url)
        # Its public method takes spans of the SDK only, and drops the answer.
        client: Any = self._exporter._client  # noqa: SLF001
        self._send_message = client.export
        self._answer = CollectorAnswer(client._transport._session)  # noqa: SLF001
        self._queue: deque[tuple[int, Trace]] = deque()
        # Each has one writer, so that neither needs a lock.
        self._put = self._got = 0
        self.drops = dict.fromkeys((NOT_QUEUED, NOT_BUILT, NOT_TAKEN, REJECTED), 0)
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._failure, self._warnings = Failure(), QuietLine("warning of the collector received")

    @property
    def dropped(self) -> int:
        """Spans that no collector got, for any reason."""
        return sum(self.drops.values())

    def refuses(self) -> bool:
        """Whether the queue has no room for a trace of one model; then its spans are dropped."""
        count = 1 + SPANS_OF_MODEL
        if self._put - self._got + count <= self._most and not self._closing:
            return False
        self.drops[NOT_QUEUED] += count
        return True

    def keep(self, trace: Trace) -> None:
        """Queue a trace, or drop it."""
        count = 1 + SPANS_OF_MODEL * len(trace.members)
        waiting = self._put - self._got + count
        if waiting > self._most or self._closing:
            self.drops[NOT_QUEUED] += count
            return
        self._queue.append((count, trace))
        self._put += count
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()
        if waiting >= self._batch and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send what waits within CLOSE_SECS; the rest is dropped."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECS)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        self._failure.thread = threading.get_ident()
        loggers = [logging.getLogger(name) for name in LOGGERS]
        for each in loggers:
            each.addFilter(self._failure)
        try:
            while not self._closing:
                self._wake.wait(self._delay)
                self._wake.clear()
                self._send_all()
            self._send_all()
        finally:
            for each in loggers:
                each.removeFilter(self._failure)

    def _send_all(self) -> None:
        spans: list[bytes] = []
        while self._queue:
            count, trace = self._queue.popleft()
            try:
                spans += spans_of(trace)
            except Exception:
                # Around one trace: the others are sent.
                log.exception("spans not built")
                self.drops[NOT_BUILT] += count
            self._got += count
            while len(spans) >= self._batch:
                self._send(spans[: self._batch])
                del spans[: self._batch]
        if spans:
            self._send(spans)

    def _send(self, spans: Sequence[bytes]) -> None:
        sent = self._send_message(export_message(self._resource, SCOPE, spans))
        if not sent.success:
            self._drop(NOT_TAKEN, len(spans))
        elif (sent.status_code or 0) >= REDIRECTIONS:  # the client takes it for a success
            self._failure.reason = f"code: {sent.status_code}, reason: {sent.reason}"
            self._drop(NOT_TAKEN, len(spans))
        else:
            self._look_at_answer(len(spans))

    def _look_at_answer(self, sent: int) -> None:
        partial = self._answer.partial_success
        rejected, text = min(partial.rejected_spans, sent), cut(partial.error_message)
        if rejected > 0:
            self._failure.reason = f"{rejected} of {sent} spans rejected: {text}"
            self._drop(REJECTED, rejected)
        elif text:
            self._warnings.write(time.monotonic(), warning=text)

    def _drop(self, reason: str, count: int) -> None:
        self.drops[reason] += count
        self._failure.report(self.dropped, time.monotonic())


class CollectorAnswer:
    """The latest answer of a collector in a session of `requests`; call it in the session's thread.

    The status of an answer counts without its body: one that is too long or too slow, breaks off or
    has another type is as an empty one.
    """

    def __init__(self, session: Any) -> None:
        self._body = b""
        session.stream = True  # bodies are read here only
        session.hooks["response"].append(self._read)

    @property
    def partial_success(self) -> ExportTracePartialSuccess:
        """The part of the answer about rejected spans; empty without one."""
        with suppress(DecodeError):
            return ExportTraceServiceResponse.FromString(self._body).partial_success
        return ExportTracePartialSuccess()

    def _read(self, response: Any, *_: object, **__: object) -> None:
        self._body = b""
        with response, suppress(OSError, HTTPError):
            body, until = b"", time.monotonic() + MOST_ANSWER_SECS
            while piece := response.raw.read1(MOST_ANSWER_BYTES, decode_content=True):
                body += piece
                if len(body) > MOST_ANSWER_BYTES or time.monotonic() > until:
                    return
            if response.headers.get("Content-Type", "").partition(";")[0].strip() == PROTOBUF:
                self._body = body


class QuietLine:
    """A line of the log that is written at most once a minute."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._next = 0.0

    def write(self, now: float, **fields: object) -> None:
        """Write it with fields, unless it was written within the minute before `now`."""
        if now >= self._next:
            self._next = now + QUIET_SECS
            log.warning(self._text, extra=fields)


class Failure(logging.Filter):
    """Takes the log lines of the exporter's thread, and writes the latest at most once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = 0
        self.reason = ""
        self._line = QuietLine("spans not exported")

    def filter(self, record: logging.LogRecord) -> bool:
        """Take a line of the thread; those of other exporters of the process pass."""
        if record.thread != self.thread:
            return True
        self.reason = record.getMessage()
        return False

    def report(self, dropped: int, now: float) -> None:
        """Write a line, unless there was one within the minute before `now`."""
        self._line.write(now, reason=self.reason, dropped=dropped)
