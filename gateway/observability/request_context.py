"""The request that a task is about: for the lines of the logs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from gateway.errors import InferenceError, Refusal
from gateway.json_lines import cut
from gateway.messages import Deadline
from gateway.observability.receipt import Receipt, in_ms
from gateway.observability.request_record import Record
from gateway.policy.caller import Caller

REASONS = {
    401: "unauthenticated",
    403: "forbidden",
    "UNAUTHENTICATED": "unauthenticated",
    "PERMISSION_DENIED": "forbidden",
}
"""The reason of a refusal of a guard by its status."""
OK = "OK"
NS_PER_MS, MS = 1e6, 1e3

CURRENT: ContextVar["LoggedRequest | None"] = ContextVar("request", default=None)
"""The request that the running task is about, if the server notes them."""

current_request: Callable[[], "LoggedRequest | None"] = CURRENT.get
"""The request that the running task is about, if the server notes them."""


class RequestSink(Protocol):
    """Takes requests that have ended."""

    def ended(self, request: "LoggedRequest") -> None:
        """Take a request, whose values do not change any more."""


class LoggedRequest:
    """One request of a client on a wire, and its end.

    Inside `with` it is the current one; afterwards it has ended. `method` is HTTP's, "" for gRPC;
    `route` is the template of the path, never the path itself. `status` is that of the wire, `code`
    of the latest error. `changes` is set for a route that changes the server. `records` are those
    of its requests to models, whose tokens its line has. Its receipt, its trace and its waits, if
    it has them, note themselves.
    """

    __slots__ = (
        "_answered_ns",
        "_first_due_ns",
        "_parts",
        "_predicted_secs",
        "_reason",
        "_sink",
        "_token",
        "_whole_due_ns",
        "began_ns",
        "bytes_in",
        "bytes_out",
        "caller",
        "changes",
        "code",
        "id",
        "method",
        "model",
        "peer",
        "receipt",
        "records",
        "route",
        "span_id",
        "status",
        "trace_id",
        "version",
        "wire",
    )

    def __init__(
        self, sink: RequestSink, wire: str, route: str, method: str = "", peer: str = ""
    ) -> None:
        self._sink = sink
        self._parts = self._answered_ns = 0
        self._token: Any = None
        self.wire, self.route, self.method, self.peer = wire, route, method, peer
        self.began_ns = time.perf_counter_ns()
        self.status: int | str = ""
        self.code = self._reason = ""
        self._predicted_secs = 0.0
        self._first_due_ns = self._whole_due_ns = 0
        self.caller: Caller | None = None
        self.changes = False
        self.receipt: Receipt | None = None
        self.model = self.version = self.id = self.trace_id = self.span_id = ""
        self.records: list[Record] = []
        self.bytes_in = self.bytes_out = 0

    def __enter__(self) -> Self:
        self._token = CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        CURRENT.reset(self._token)
        if not (self._parts and self.status == OK):
            self._sink.ended(self)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current one inside `with`; it has not ended then."""
        token = CURRENT.set(self)
        try:
            yield
        finally:
            CURRENT.reset(token)

    def answered_unread(self) -> None:
        """Note that the answer is sent, and that the body is not read; its line has this time."""
        self._answered_ns = time.perf_counter_ns()
        self.bytes_in = 0

    def belongs(self, trace_id: int, span_id: int) -> None:
        """Set the ids of its trace and its span."""
        self.trace_id, self.span_id = f"{trace_id:032x}", f"{span_id:016x}"

    def note(self, error: InferenceError) -> None:
        """Note an error, without the frames that it refers to."""
        self.code = error.code.name
        self._reason = error.refusal_reason if isinstance(error, Refusal) else ""

    def waits(self, deadline: Deadline | None, predicted_secs: float | None = None) -> None:
        """Note its deadline, and the predicted wait for its first response."""
        if deadline is not None:
            self._first_due_ns, self._whole_due_ns = deadline.first_ns, deadline.whole_ns
        self._predicted_secs = predicted_secs or 0.0

    def part(self, request_id: str, caller: Caller | None) -> "LoggedRequest":
        """One of several requests in this RPC, which has a line of its own only if it fails."""
        self._parts += 1
        found = LoggedRequest(self._sink, self.wire, self.route, self.method, self.peer)
        found.id, found.caller = request_id, caller
        found.trace_id, found.span_id = self.trace_id, self.span_id
        return found

    def names(self) -> dict[str, Any]:
        """Its ids and its tenant, those that are known, and `audit` if it changes the server."""
        found = {
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "request_id": cut(self.id),
            "tenant": "" if self.caller is None else cut(self.caller.tenant),
            "audit": self.changes,
        }
        return {name: value for name, value in found.items() if value}

    def members(self) -> dict[str, Any]:
        """The members of its line."""
        lasted_ns = (self._answered_ns or time.perf_counter_ns()) - self.began_ns
        found: dict[str, Any] = {
            "wire": self.wire,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "code": self.code,
            "reason": REASONS.get(self.status, self._reason),
            "duration_ms": round(lasted_ns / NS_PER_MS, 3),
            "predicted_wait_ms": round(self._predicted_secs * MS, 3),
            "first_deadline_ms": self._ms_until(self._first_due_ns),
            "deadline_ms": self._ms_until(self._whole_due_ns),
            "peer": self.peer,
            "key_id": "" if self.caller is None else cut(self.caller.key_id),
            "model": cut(self.model),
            "version": self.version,
            "prompt_tokens": sum(each.prompt_tokens for each in self.records),
            "completion_tokens": sum(each.completion_tokens for each in self.records),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "timing": None if self.receipt is None else in_ms(self.receipt.parts()),
            **self.names(),
        }
        return {name: value for name, value in found.items() if value}

    def _ms_until(self, ns: int) -> float:
        """The time from its beginning to that time, which may lie before it; 0 for none."""
        return round((ns - self.began_ns) / NS_PER_MS, 3) if ns else 0.0
