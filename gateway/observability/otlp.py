"""The export of traces to a collector, by OTLP over HTTP, in a thread of its own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.exporter.http.transport._base import BaseHTTPResult, BaseHTTPTransport
from opentelemetry.exporter.http.transport._urllib3 import Urllib3HTTPResult
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from requests import Request, Session
from requests.adapters import HTTPAdapter
from urllib3 import BaseHTTPResponse, HTTPConnectionPool, Timeout
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from gateway.json_lines import cut
from gateway.observability.otlp_wire import ExportForm
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import spans_of
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
ONE_TRY = Retry(0, read=False)
"""As in `requests`: the SDK's client tries again."""
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
        self._form = ExportForm(Resource.create(own).attributes, SCOPE)
        self._exporter = OTLPSpanExporter(settings.url)
        # Its public method takes spans of the SDK only, and drops the answer.
        client: Any = self._exporter._client  # noqa: SLF001
        self._send_message = client.export
        self._answer = CollectorAnswer()
        session = client._transport._session  # noqa: SLF001
        if _is_plain(session):
            headers = client._headers  # noqa: SLF001
            client._transport = PooledTransport(session, settings.url, headers, self._answer)  # noqa: SLF001
        else:  # of a credential provider, which has its own ways to send
            self._answer.follow(session)
        self._queue: deque[tuple[int, SpanTrace]] = deque()
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

    def keep(self, trace: SpanTrace) -> None:
        """Queue a trace, or drop it."""
        count = 1 + SPANS_OF_MODEL * (1 + len(trace.descendants))
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
                is_full = self._wake.wait(self._delay)
                self._wake.clear()
                self._send_all(self._batch if is_full else 1)
            self._send_all(1)
        finally:
            for each in loggers:
                each.removeFilter(self._failure)

    def _send_all(self, least: int) -> None:
        """Send batches while at least that many spans wait.

        So a batch that is sent because it is full has no small one behind it.
        """
        while self._put - self._got >= least and self._queue:
            spans = self._next_batch()
            for begin in range(0, len(spans), self._batch):
                self._send(spans[begin : begin + self._batch])

    def _next_batch(self) -> Sequence[bytes]:
        """The spans of the oldest traces; more than a batch if a trace has more than it counts."""
        spans: list[bytes] = []
        left = self._batch
        while self._queue and (self._queue[0][0] <= left or left == self._batch):
            count, trace = self._queue.popleft()
            left -= count
            self._got += count
            try:
                spans += spans_of(trace)
            except Exception:
                # Around one trace: the others are sent.
                log.exception("spans not built")
                self.drops[NOT_BUILT] += count
        return spans

    def _send(self, spans: Sequence[bytes]) -> None:
        sent = self._send_message(self._form.message(spans))
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


def _is_plain(session: Session) -> bool:
    """Whether a session has no ways of its own to send, as that of a credential provider may."""
    adapters = {type(each) for each in session.adapters.values()}
    has_hooks = any(session.hooks.values())
    return type(session) is Session and not (session.auth or has_hooks or adapters - {HTTPAdapter})


class CollectorAnswer:
    """The latest answer of a collector; read it in the thread that sends.

    The status of an answer counts without its body: one that is too long or too slow, breaks off or
    has another type is as an empty one.
    """

    def __init__(self) -> None:
        self._body = b""

    @property
    def partial_success(self) -> ExportTracePartialSuccess:
        """The part of the answer about rejected spans; empty without one."""
        if self._body:
            with suppress(DecodeError):
                return ExportTraceServiceResponse.FromString(self._body).partial_success
        return ExportTracePartialSuccess()

    def follow(self, session: Session) -> None:
        """Read all answers of a session of `requests`."""
        session.stream = True  # bodies are read here only
        session.hooks["response"].append(lambda response, *_, **__: self.read(response.raw))

    def read(self, response: BaseHTTPResponse) -> None:
        """Read an answer, and return its connection."""
        self._body = b""
        with response, suppress(OSError, HTTPError):
            body, until = b"", time.monotonic() + MOST_ANSWER_SECS
            while piece := response.read1(MOST_ANSWER_BYTES, decode_content=True):
                body += piece
                if len(body) > MOST_ANSWER_BYTES or time.monotonic() > until:
                    return
            if response.headers.get("Content-Type", "").partition(";")[0].strip() == PROTOBUF:
                self._body = body


class PooledTransport(BaseHTTPTransport):
    """Requests to one URL, by the pool of connections that a session of `requests` has for it.

    The session would read the environment and write the same headers for each message, which takes
    five times as long as all the rest. Here the first one takes them from the session: proxies,
    certificates, passwords of `.netrc`.
    """

    def __init__(
        self, session: Session, url: str, headers: Mapping[str, str], answer: CollectorAnswer
    ) -> None:
        self._session = session
        self._request = Request("POST", url, headers=headers)
        self._answer = answer

    @cached_property
    def _target(self) -> tuple[HTTPConnectionPool, str, Mapping[str, str]]:
        """The pool, the path and the headers of each request."""
        session = self._session
        request = session.prepare_request(self._request)
        url = request.url or ""
        found = session.merge_environment_settings(url, {}, None, None, None)
        proxies, verify, certificate = (found[name] for name in ("proxies", "verify", "cert"))
        adapter: Any = session.get_adapter(url)
        pool = adapter.get_connection_with_tls_context(request, verify, proxies, certificate)
        adapter.cert_verify(pool, url, verify, certificate)
        own: Any = request.headers
        del own["Content-Length"]  # that of a request without a body
        return pool, adapter.request_url(request, proxies), {**own}

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        data: bytes | None = None,
    ) -> BaseHTTPResult:
        """The result of a request, of which the SDK's client changes the data only."""
        pool, path, own = self._target
        try:
            response = pool.urlopen(
                *(method, path, data, own, ONE_TRY),
                redirect=False,
                assert_same_host=False,
                timeout=Timeout(connect=timeout, read=timeout),
                preload_content=False,
                decode_content=False,
            )
        except (HTTPError, OSError) as error:
            return Urllib3HTTPResult(error=error)
        self._answer.read(response)
        return Urllib3HTTPResult(response.status, response.reason, response=response)

    def is_connection_error(self, exception: Exception | None) -> bool:
        """Whether a request has failed before its answer."""
        return isinstance(exception, HTTPError | OSError)

    def close(self) -> None:
        """Close idle connections."""
        self._session.close()


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
