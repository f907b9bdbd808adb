"""One request of a model whose waits are predicted: its deadline, and what the model learns."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from gateway.admission.booking import Booking
from gateway.admission.costs import Asked
from gateway.admission.deadlines import NO_DEADLINE, NS_PER_SECOND, earliest
from gateway.errors import InferenceError, Refusal, RefusalReason, RetryAdvice
from gateway.messages import Deadline, InferResponse, StreamRecorder
from gateway.observability.request_record import Record, RequestsInFlight
from gateway.observability.stream_tap import StreamTap, Tap

NS_PER_MS = 1_000_000


class WaitObserver(Protocol):
    """The model of a timed request, which learns from its times; see `ModelWaits`."""

    requests: RequestsInFlight

    def arrived(self, timed: "TimedRequest", rows: int) -> None:
        """It was accepted; `rows` is its batch size."""

    def begun(self, timed: "TimedRequest") -> None:
        """It got its first response, at `first_ns`."""

    def ended(self, timed: "TimedRequest", error: InferenceError | None) -> None:
        """It ended, at `ended_ns`."""


class TimedRequest(StreamTap):
    """The times of one request.

    One timer of the event loop holds its deadline, and is cancelled at its end: libuv keeps timers
    in a heap, so that one costs a microsecond, and nothing is left of a request that has ended.
    `raw` is the predicted wait in seconds, without the correction of its tenant, `predicted` with
    it, None if too little is known to refuse; it `waits` if the model was full. `first_answers` are
    the tokens of its first response, `last_ns` is the time of its latest tokens. `is_probe`: it was
    refused, and admitted all the same. It `learns` unless its account does. It has `places` of the
    room of its model: one, or one for each row.
    """

    __slots__ = (
        "_model",
        "_timer",
        "arrived_ns",
        "asked",
        "deadline",
        "ended_ns",
        "first_answers",
        "first_ns",
        "is_probe",
        "last_ns",
        "learns",
        "places",
        "predicted",
        "prompt_estimate",
        "raw",
        "service",
        "tenant",
        "waits",
    )

    def __init__(
        self,
        model: WaitObserver,
        tenant: str,
        asked: Asked,
        deadline: Deadline | None,
        tap: Tap | None,
    ) -> None:
        super().__init__(tap)
        self._model = model
        self._timer: asyncio.TimerHandle | None = None
        self.tenant, self.asked = tenant, asked
        self.learns = not isinstance(tap, Booking)
        self.deadline = deadline or NO_DEADLINE
        self.arrived_ns = time.perf_counter_ns()
        self.first_ns = self.last_ns = self.ended_ns = 0
        self.first_answers = self.prompt_estimate = 0
        self.places = 1
        self.service = self.raw = 0.0
        self.predicted: float | None = None
        self.waits = self.is_probe = False

    @property
    def met_deadline(self) -> bool:
        """Whether its responses came in time, once it has ended."""
        first, whole = self.deadline.first_ns, self.deadline.whole_ns
        in_time = bool(self.first_ns) and not 0 < first < self.first_ns
        return in_time and not 0 < whole < self.ended_ns

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        found = super().recorder(record, account)
        self._model.arrived(self, record.batch_size)
        self._hold()
        return found

    def responded(self, response: InferResponse) -> None:
        """See `StreamRecorder`."""
        before = self.record.completion_tokens
        self.account.responded(response)
        self._note(before)

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """See `StreamRecorder`."""
        before = self.record.completion_tokens
        self.account.delivered(name, texts, tokens)
        self._note(before)

    def ended(self, error: InferenceError | None) -> None:
        """See `StreamRecorder`."""
        if self._timer is not None:
            self._timer.cancel()
        self.ended_ns = time.perf_counter_ns()
        self._model.ended(self, error)
        self.account.ended(error)

    def _note(self, before: int) -> None:
        """Note the times of a response; its request had as many tokens before."""
        if self.record.completion_tokens > before:
            self.last_ns = time.perf_counter_ns()
        if not self.first_ns:
            self._begin()

    def _begin(self) -> None:
        self.first_ns, self.first_answers = time.perf_counter_ns(), self.record.completion_tokens
        self._model.begun(self)
        if self.deadline.held_first_ns:
            if self._timer is not None:
                self._timer.cancel()
            self._hold()

    def _hold(self) -> None:
        """Set the timer of its next deadline."""
        first = 0 if self.first_ns else self.deadline.held_first_ns
        at_ns = earliest(first, self.deadline.held_whole_ns)
        self._timer = None
        if at_ns:
            # Rounded up, as the loop has milliseconds.
            left_ms = -((time.perf_counter_ns() - at_ns) // NS_PER_MS)
            self._timer = asyncio.get_running_loop().call_later(max(0, left_ms) / 1e3, self._expire)

    def _expire(self) -> None:
        """End the request: it leaves its queue, or its execution is cancelled."""
        self._timer = None
        stream = self._model.requests.get(self.record)
        if stream is not None:
            stream.abandon(exceeded(self.record.completion_tokens))


def exceeded(tokens: int, *, retries: bool = True) -> Refusal:
    """The end of a request at its deadline."""
    text = f"deadline exceeded after {tokens} {'token' if tokens == 1 else 'tokens'}"
    return Refusal(RefusalReason.DEADLINE_EXCEEDED, text, RetryAdvice(retries=retries))


def is_exceeded(error: InferenceError | None) -> bool:
    """Whether a request has ended at its deadline."""
    found = isinstance(error, Refusal) and error.refusal_reason
    return found is RefusalReason.DEADLINE_EXCEEDED


def unreachable(wait_secs: float, left_secs: float, what: str) -> Refusal:
    """The refusal of a request that would miss its deadline."""
    text = (
        f"{what} is expected in {shown_ms(wait_secs)} ms, and its deadline is in "
        f"{shown_ms(left_secs)} ms; retry later, or with a later deadline"
    )
    advice = RetryAdvice(
        retry_after_secs=max(0.0, wait_secs - left_secs), predicted_wait_secs=wait_secs
    )
    return Refusal(RefusalReason.DEADLINE_UNREACHABLE, text, advice)


def shown_ms(secs: float) -> str:
    """Seconds as a number of milliseconds."""
    return f"{secs * 1e3:.0f}"


def seconds(ns: int) -> float:
    """Nanoseconds as seconds."""
    return ns / NS_PER_SECOND
