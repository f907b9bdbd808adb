"""The export of traces to a collector, by OTLP over HTTP, in a thread of its own."""

import logging
import threading
import time
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
from requests import Session
from requests.adapters import HTTPAdapter

from gateway.json_lines import cut
from gateway.observability.otlp_transport import CollectorAnswer, KeptConnection
from gateway.observability.otlp_wire import ExportForm
from gateway.observability.span_queue import NOT_QUEUED, SpanQueue
from gateway.span_settings import SpanSettings
from gateway.tensor import Buffer

log = logging.getLogger("sluice.trace")

SCOPE = "triton-server"
SERVICE_NAME = "service.name"
SERVICE = "triton-inference-server"
"""Triton's name, in place of which a user may set another one."""
CLOSE_SECS = 2.0
"""Time for the last spans when the server stops."""
QUIET_SECS = 60.0
"""Time between two lines of the log about a collector that takes no spans."""
REDIRECTIONS = 300
"""The first status of an answer from which nothing was taken."""
NOT_BUILT, NOT_TAKEN, REJECTED = "not_built", "not_taken", "rejected"
"""The other reasons of dropped spans: a defect, no answer of the collector with a status of
success, and such an answer with `partial_success`."""
LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
)


class SpanExporter:
    """Keeps complete traces until its thread sends their spans; on the event loop it only appends.

    While the collector takes none the queue fills, and further traces are dropped.
    """

    def __init__(self, settings: SpanSettings) -> None:
        self._batch = settings.bsp_max_export_batch_size
        self._delay = settings.bsp_schedule_delay / 1000
        own = {SERVICE_NAME: SERVICE, **dict(settings.resource)}
        self._form = ExportForm(Resource.create(own).attributes, SCOPE)
        self._exporter = OTLPSpanExporter(settings.url)
        # Its public method takes spans of the SDK only, and drops the answer.
        client: Any = self._exporter._client  # noqa: SLF001
        self._send_message = client.export
        self._answer = CollectorAnswer()
        session = client._transport._session  # noqa: SLF001
        if _is_plain(session):
            headers = client._headers  # noqa: SLF001
            client._transport = KeptConnection(session, settings.url, headers, self._answer)  # noqa: SLF001
        else:  # of a credential provider, which has its own ways to send
            self._answer.follow(session)
        self.drops = dict.fromkeys((NOT_QUEUED, NOT_BUILT, NOT_TAKEN, REJECTED), 0)
        most = settings.bsp_max_queue_size
        queue = self._queue = SpanQueue(most, self._batch, self.drops, self._start)
        self.ids, self.refuses, self.keep = queue.ids, queue.refuses, queue.keep
        self._closing = False
        self._thread: threading.Thread | None = None
        self._failure, self._warnings = Failure(), QuietLine("warning of the collector received")

    @property
    def dropped(self) -> int:
        """Spans that no collector got, for any reason."""
        return sum(self.drops.values())

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send what waits within CLOSE_SECS; the rest is dropped."""
        self._closing, self._queue.most = True, 0
        self._queue.wake.set()
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
                is_full = self._queue.wake.wait(self._delay)
                self._queue.wake.clear()
                self._send_all(self._batch if is_full else 1)
            self._send_all(1)
        finally:
            for each in loggers:
                each.removeFilter(self._failure)

    def _send_all(self, least: int) -> None:
        """Send batches while at least that many spans wait.

        So a batch that is sent because it is full has no small one behind it.
        """
        while self._queue.waiting >= least:
            batch = self._queue.next_batch(self._batch)
            self.drops[NOT_BUILT] += batch.failed
            for spans, count in batch.messages(self._batch):
                self._send(spans, count)

    def _send(self, spans: Sequence[Buffer], count: int) -> None:
        sent = self._send_message(self._form.message(spans))
        if not sent.success:
            self._drop(NOT_TAKEN, count)
        elif (sent.status_code or 0) >= REDIRECTIONS:  # the client takes it for a success
            self._failure.reason = f"code: {sent.status_code}, reason: {sent.reason}"
            self._drop(NOT_TAKEN, count)
        else:
            self._look_at_answer(count)

    def _look_at_answer(self, sent: int) -> None:
        if not self._answer.body:
            return
        partial = ExportTracePartialSuccess()
        with suppress(DecodeError):
            partial = ExportTraceServiceResponse.FromString(self._answer.body).partial_success
        rejected, text = min(partial.rejected_spans, sent), cut(partial.error_message)
        if rejected > 0:
            self._failure.reason = f"{rejected} of {sent} spans rejected: {text}"
            self._drop(REJECTED, rejected)
        elif text:
            self._warnings.write(time.monotonic(), warning=text)

    def _drop(self, reason: str, count: int) -> None:
        self.drops[reason] += count
        self._failure.report(self.dropped, time.monotonic())


def _is_plain(session: Session) -> bool:
    """Whether a session has no ways of its own to send, as that of a credential provider may."""
    adapters = {type(each) for each in session.adapters.values()}
    has_hooks = any(session.hooks.values())
    return type(session) is Session and not (session.auth or has_hooks or adapters - {HTTPAdapter})


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
