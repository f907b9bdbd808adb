"""The export of traces to a collector, by OTLP over HTTP, in a thread of its own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource

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
        # Its public method takes spans of the SDK only.
        self._send_message = self._exporter._client.export  # noqa: SLF001
        self._queue: deque[tuple[int, Trace]] = deque()
        # Each has one writer, so that neither needs a lock.
        self._put = self._got = 0
        self._lost_here = self._lost_there = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._failure = Failure()

    @property
    def dropped(self) -> int:
        """Spans that did not fit into the queue, or that the collector did not take."""
        return self._lost_here + self._lost_there

    def keep(self, trace: Trace) -> None:
        """Queue a trace, or drop it."""
        count = 1 + SPANS_OF_MODEL * len(trace.members)
        waiting = self._put - self._got + count
        if waiting > self._most or self._closing:
            self._lost_here += count
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
                self._lost_there += count
            self._got += count
            while len(spans) >= self._batch:
                self._send(spans[: self._batch])
                del spans[: self._batch]
        if spans:
            self._send(spans)

    def _send(self, spans: Sequence[bytes]) -> None:
        sent = self._send_message(export_message(self._resource, SCOPE, spans))
        is_elsewhere = sent.success and (sent.status_code or 0) >= REDIRECTIONS
        if is_elsewhere:  # the client takes it for a success
            self._failure.reason = f"code: {sent.status_code}, reason: {sent.reason}"
        if is_elsewhere or not sent.success:
            self._lost_there += len(spans)
            self._failure.report(self.dropped, time.monotonic())


class Failure(logging.Filter):
    """Takes the log lines of the exporter's thread, and writes the latest at most once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = 0
        self.reason = ""
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Take a line of the thread; those of other exporters of the process pass."""
        if record.thread != self.thread:
            return True
        self.reason = record.getMessage()
        return False

    def report(self, dropped: int, now: float) -> None:
        """Write a line, unless there was one within the minute before `now`."""
        if now >= self._next:
            self._next = now + QUIET_SECS
            log.warning("spans not exported", extra={"reason": self.reason, "dropped": dropped})
