"""Shadow traffic: copies of stable's requests for the candidate, whose answers are compared."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from random import random

from gateway.backend import MetricReading
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, StreamRecorder
from gateway.models.model import Model
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics, is_timeout
from gateway.observability.stream_tap import StreamTap
from gateway.rollouts.comparison import KeptAnswer
from gateway.rollouts.copying import copied, why_not_copied
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.observation import Arm, Observation
from gateway.stream import ResponseStream
from gateway.threads import LARGE_BYTES, Threads

DEFAULT_IN_FLIGHT = 8
REQUESTS = "gateway_shadow_requests_total"
IN_FLIGHT = "gateway_shadow_in_flight"
SHADOW_METRICS = {
    REQUESTS: "Copies of requests for the candidate of a rollout, by outcome",
    IN_FLIGHT: "Copies of requests that have not ended",
}


class CopyOutcome(StrEnum):
    """The end of a copy; `dropped` ones were not sent, or waited for too long."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not_compared"
    FAILED = "failed"
    DROPPED = "dropped"
    CANCELLED = "cancelled"


class Shadow:
    """Copies a share of stable's requests, from 0 to 1, to the candidate.

    A copy is sent once stable's answer has begun or failed, at the lowest priority; its answer is
    compared and dropped. At most `most_in_flight` copies are in flight, or being compared. Without
    `side_effects` models that call others get none. `close` it after the last `tap`.
    """

    def __init__(
        self,
        stable: Model,
        candidate: Model,
        evidence: Evidence,
        threads: Threads,
        most_in_flight: int = DEFAULT_IN_FLIGHT,
        *,
        side_effects: bool = False,
    ) -> None:
        self.share = 0.0
        self.outcomes: Counter[CopyOutcome] = Counter()
        self.statistics = ModelStatistics.of(candidate.config)
        """Of copies only: they are in no statistics of the protocol."""
        self.candidate = candidate
        self.evidence = evidence
        self.threads = threads
        """For the comparisons of large answers."""
        self._stable = stable
        self._most_in_flight = most_in_flight
        self._side_effects = side_effects
        self._copies: set[ShadowedRequest] = set()
        self._is_closed = False

    def tap(
        self, request: InferRequest, key: bytes = b""
    ) -> "Observation | ShadowedRequest | None":
        """The tap of a request to stable; None for one of a kind that is never copied.

        Such a request is no evidence either: those of the candidate would be of other kinds.
        """
        if self._is_closed or self._calls_models or why_not_copied(request):
            return None
        if random() >= self.share:
            return self.evidence.tap(Arm.STABLE, key)
        own = Observation(self.evidence, Arm.STABLE, key)
        return ShadowedRequest(self, request, own, CopyObservation(self.evidence, Arm.COPY, key))

    @property
    def has_room(self) -> bool:
        """Whether another copy may be sent."""
        return not self._is_closed and len(self._copies) < self._most_in_flight

    def begin(self, copy: "ShadowedRequest") -> None:
        """Count a copy as in flight."""
        self._copies.add(copy)

    def end(self, copy: "ShadowedRequest", outcome: CopyOutcome) -> None:
        """Count the end of a copy."""
        self._copies.discard(copy)
        self.outcomes[outcome] += 1

    def close(self) -> None:
        """Cancel the copies in flight."""
        self._is_closed = True
        for copy in tuple(self._copies):
            copy.cancel()

    def families(self) -> list[MetricReading]:
        """The metrics of the copies."""
        labels = {"model": self.candidate.name, "version": self.candidate.version}
        requests = MetricReading(REQUESTS, SHADOW_METRICS[REQUESTS], "counter")
        for outcome in CopyOutcome:
            requests.add_sample(
                REQUESTS, {**labels, "outcome": outcome.value}, self.outcomes[outcome]
            )
        in_flight = MetricReading(IN_FLIGHT, SHADOW_METRICS[IN_FLIGHT], "gauge")
        in_flight.add_sample(IN_FLIGHT, labels, len(self._copies))
        return [requests, in_flight]

    def copy_of(self, request: InferRequest) -> InferRequest:
        """The request of a copy."""
        return copied(request, self.candidate)

    @property
    def _calls_models(self) -> bool:
        """Whether a copy would make requests to models that count them."""
        models = (self._stable, self.candidate)
        if any(each.of_fleet for each in models):
            return True
        calls = any(each.members or each.statistics.calls for each in models)
        return not self._side_effects and bool(calls or self.statistics.calls)


class CopyObservation(Observation):
    """The observation of a copy; it ends once its answer is compared."""

    __slots__ = ()

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`; the copy was admitted with stable's request."""
        return StreamTap.recorder(self, record, account)

    def admit_with(self, own: Observation) -> None:
        """Admit the copy to the block of stable's request: both are answers to the same."""
        self.admitted_ns, self.received_ns = own.admitted_ns, own.received_ns
        self._observer.admit(self)

    def ended(self, error: InferenceError | None) -> None:
        """Pass the event on; the copy ends with `compare`."""
        self.account.ended(error)
        self.last_ns = self.record.progress_ns

    def compare(self, error: InferenceError | None, *, differs: bool) -> None:
        """Take the result of the copy and of the comparison to the observer."""
        self.ended_ns = time.perf_counter_ns()
        self.differs = differs
        self.finish(error)


class ShadowedRequest(StreamTap):
    """A request to stable and its copy.

    The copy's stream has no task: it is read when it changes.
    """

    def __init__(
        self, shadow: Shadow, request: InferRequest, own: Observation, copied: CopyObservation
    ) -> None:
        super().__init__(own)
        self._shadow = shadow
        self._request = request
        self._own = own
        self._copied = copied
        self._answer, self._copied_answer = KeptAnswer(), KeptAnswer()
        self._error: InferenceError | None = None
        self._stream: ResponseStream | None = None
        self._comparison: asyncio.Future[bool | None] | None = None
        self._is_due = self._has_ended = self._is_answered = self._is_over = False

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        found = super().recorder(record, account)
        self._copied.admit_with(self._own)
        return found

    def responded(self, response: InferResponse) -> None:
        """Keep a response of stable, and send the copy after the first."""
        self.account.responded(response)
        if not self._is_over:
            self._answer.add(response)
            self._send_soon()

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded` of each."""
        self.account.delivered(name, texts, tokens)
        if not self._is_over:
            self._answer.add_texts(name, texts)
            self._send_soon()

    def ended(self, error: InferenceError | None) -> None:
        """Send the copy of a request that failed, or compare the answers if it has ended, too."""
        self.account.ended(error)
        self._has_ended, self._error = True, error
        if error is not None and error.code is Code.CANCELLED:
            self.cancel()
        elif self._is_answered:
            self._compare()
        else:
            self._send_soon()

    # The copy.

    def cancel(self) -> None:
        """End the copy, which is no evidence then; idempotent."""
        stream, self._stream = self._stream, None
        self._drop(CopyOutcome.CANCELLED)
        if stream is not None:
            stream.cancel()
        if self._comparison is not None:
            self._comparison.cancel()

    def _send_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        if self._is_over:
            return
        if not self._shadow.has_room:
            self._drop(CopyOutcome.DROPPED)
            return
        shadow = self._shadow
        try:
            request = shadow.copy_of(self._request)
            self._stream = shadow.candidate.copy(request, shadow.statistics, self._copied)
        except InferenceError as error:
            if error.code is Code.UNAVAILABLE and not error.lacks_instance:
                self._drop(CopyOutcome.DROPPED)
            else:
                self._fail(error)
            return
        shadow.begin(self)
        self._stream.listen(self._read)

    def _read(self) -> None:
        """Take what the candidate has answered. The listener of the copy's stream."""
        while self._stream is not None:
            try:
                taken = self._stream.take()
            except InferenceError as error:
                self._fail(error)
                return
            if taken is None:
                return
            for response in taken:
                self._copied_answer.add(response)
            if not taken:
                self._stream, self._is_answered = None, True
                if self._has_ended:
                    self._compare()

    def _fail(self, error: InferenceError) -> None:
        """End a copy that failed; one that waited for too long is dropped."""
        self._stream = None
        if is_timeout(error.message):
            self._drop(CopyOutcome.DROPPED)
            return
        self._copied.compare(error, differs=False)
        self._end(CopyOutcome.FAILED if self._copied.failed else CopyOutcome.NOT_COMPARED)

    def _compare(self) -> None:
        """Compare the answers, large ones in a thread."""
        one, other = self._answer, self._copied_answer
        if self._error is not None:
            self._count(None)
        elif one.size + other.size <= LARGE_BYTES:
            self._count(one.differs(other))
        else:
            try:
                self._comparison = self._shadow.threads.start(one.differs, other)
            except InferenceError:  # the server exits
                self.cancel()
                return
            self._comparison.add_done_callback(self._compared)

    def _compared(self, comparison: "asyncio.Future[bool | None]") -> None:
        if comparison.cancelled():
            self._drop(CopyOutcome.CANCELLED)
        elif not self._is_over:
            self._count(comparison.result())

    def _count(self, differs: bool | None) -> None:
        self._copied.compare(None, differs=bool(differs))
        if differs is None:
            self._end(CopyOutcome.NOT_COMPARED)
        else:
            self._end(CopyOutcome.DIFFERENT if differs else CopyOutcome.EQUAL)

    def _drop(self, outcome: CopyOutcome) -> None:
        if not self._is_over:
            self._shadow.evidence.withdraw(self._copied)
            self._end(outcome)

    def _end(self, outcome: CopyOutcome) -> None:
        self._is_over = True
        self._answer = self._copied_answer = KeptAnswer()
        self._shadow.end(self, outcome)
