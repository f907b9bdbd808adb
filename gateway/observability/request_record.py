"""Records of requests: times of events, counted once at the end of each stream."""

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.errors import AnsweredError, Code, InferenceError
from gateway.event_loop import BusyPoll
from gateway.messages import EngineStamps, InferResponse, Phases, Usage, responses_of_texts
from gateway.observability.accounts import LimitsAccount, Passing, TenantsInFlight, TokenReader
from gateway.observability.statistics import (
    MAX_RESPONSE_ROWS,
    ModelStatistics,
    count_each,
    failure_reason,
    within,
)
from gateway.observability.trace import Trace
from gateway.stream import ResponseStream

NS_PER_SECOND = 1e9
NOT_BOOKED = [0.0] * 4  # compute ms, when they are back, estimated service, if in flight


class Record:
    """Implements `StreamRecorder`.

    Queue time is from submission to the start of the execution, compute time from there to at most
    its end, so success time is never less than their sum. A cached response calls `hit` instead of
    `started`. `batch_size` is the number of inferences. `progress_ns` is the time of the latest
    response, else of the start, else of the submission. `phases` are the latest that were measured,
    `engine` the stamps of its engine. `execution_rows` is the batch size of its execution, 0 if it
    was alone in it. A fair queue sets `released_ns`. `failure` is its error: code and text. It has
    the only count of the tokens of its responses; `cached_tokens` are of its prompt, or unknown.
    Its `account`, `booked`, `reader` and `tenant` are for limits and a fair queue. With an
    allowance it has `entered_at` and `left_at`, and the phases and rows of its `execution`.
    """

    __slots__ = (
        "_answers",
        "_first_ns",
        "_hit_ns",
        "_last_ns",
        "_last_tokens_ns",
        "_on_end",
        "account",
        "batch_size",
        "booked",
        "cached_tokens",
        "completion_tokens",
        "ended_ns",
        "engine",
        "entered_at",
        "execution",
        "execution_rows",
        "failure",
        "left_at",
        "phases",
        "progress_ns",
        "prompt_tokens",
        "reader",
        "received_ns",
        "released_ns",
        "started_ns",
        "statistics",
        "submitted_ns",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        statistics: ModelStatistics,
        batch_size: int,
        received_ns: int,
        on_end: Callable[["Record"], None],
        trace: Trace | None = None,
        allowance: Passing | None = None,
    ) -> None:
        self.statistics, self.batch_size, self._on_end = statistics, batch_size, on_end
        self.submitted_ns = self.progress_ns = time.perf_counter_ns()
        self.received_ns = received_ns or self.submitted_ns
        self.started_ns = self._hit_ns = self._answers = self._first_ns = self._last_ns = 0
        self._last_tokens_ns = self.released_ns = self.ended_ns = self.execution_rows = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.cached_tokens: int | None = None
        self.phases: Phases | None = None
        self.engine: EngineStamps | None = None
        self.failure: tuple[Code, str] | None = None
        self.trace = trace
        self.account: LimitsAccount | None = allowance
        self.booked = NOT_BOOKED
        self.execution: tuple[Phases, int] | None = None
        self.reader: TokenReader | None = None
        self.tenant: str | None = None
        statistics.pending += 1
        if allowance is not None:
            self.reader, self.entered_at = allowance.passage, allowance.now
            self.left_at, self.released_ns = 0.0, self.submitted_ns
            allowance.note(self)
            if batch_size > 1:
                allowance.passage.take(batch_size - 1)  # it may take a place for each

    def started(self) -> None:
        """Record that an instance executes the request; idempotent."""
        if self.started_ns:
            return
        self.started_ns = self._last_ns = self.progress_ns = time.perf_counter_ns()
        self.statistics.pending -= 1

    def compute_ms(self, now: int) -> float:
        """The compute time of its execution until now; of a batch the part of its rows."""
        if not self.started_ns or self._hit_ns:
            return 0.0
        spent_ns, phases, own = now - self.started_ns, self.phases, self.batch_size
        if phases is not None:  # as the sum of `within`
            spent_ns = min(spent_ns, phases.input_ns + phases.infer_ns + phases.output_ns)
        rows = self.execution_rows
        return spent_ns / 1e6 * own / (rows if rows > own else own or 1)

    @property
    def is_hit(self) -> bool:
        """Whether the response cache has answered."""
        return bool(self._hit_ns)

    @property
    def has_tokens(self) -> bool:
        """Whether responses had tokens."""
        return bool(self._last_tokens_ns)

    def queued_again(self) -> None:
        """Record that the request is back in its queue: the instance did not execute it."""
        if self.started_ns:
            self.started_ns = self.execution_rows = 0
            self.statistics.pending += 1

    def hit(self, lookup_ns: int) -> None:
        """Record a cached response, found just now by a lookup of that duration.

        Call it before the response is put into the stream.
        """
        self._hit_ns = lookup_ns
        self.started_ns = self._last_ns = time.perf_counter_ns() - lookup_ns
        self.received_ns = min(self.received_ns, self.started_ns)  # the look-up came first
        self.statistics.pending -= 1

    def missed(self, lookup_and_insert_ns: int) -> None:
        """Record that the cache had no response, and now has it; may follow the end."""
        statistics = self.statistics
        statistics.cache_miss.add(lookup_and_insert_ns)
        statistics.success.lengthen(lookup_and_insert_ns)
        if statistics.summaries is not None:
            statistics.summaries.missed(lookup_and_insert_ns)

    def responded(self, response: InferResponse) -> None:
        """Record the time and the tokens of a response."""
        statistics, now = self.statistics, time.perf_counter_ns()
        self.progress_ns = now
        self.phases, self.engine = response.phases or self.phases, response.engine or self.engine
        trace = self.trace
        if trace is not None and (trace.reads_responses or response.usage or response.engine):
            trace.responded(response, now, first=not self._first_ns)
        if not self._first_ns:
            self._first_ns = now
            if trace is not None:
                trace.answered_ns = now
            elapsed_ms = (now - self.received_ns) // 1_000_000
            statistics.first_response_ms.observe(elapsed_ms, trace, now)
        if statistics.responses is not None:
            if response.error is not None:
                self._count_failed_response(now, response.error)
                self._answers += 1
                self._last_ns = now
            else:
                output_ns = 0 if response.phases is None else response.phases.output_ns
                self._count_response(now, output_ns, has_outputs=bool(response.outputs))
        usage = response.usage
        if usage is not None:
            statistics.prompt_tokens += usage.prompt_tokens
            self.prompt_tokens += usage.prompt_tokens
            if usage.cached_tokens is not None:
                self.cached_tokens = (self.cached_tokens or 0) + usage.cached_tokens
            self._count_completion(now, usage.completion_tokens, usage)

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded`, for texts that are already written."""
        if self.trace is not None or not self._first_ns:
            for each in responses_of_texts(name, texts, tokens):
                self.responded(each)
            return
        self.progress_ns = now = time.perf_counter_ns()
        has_rows = self.statistics.responses is not None
        for count in tokens:
            if has_rows:
                self._count_response(now, 0, has_outputs=True)
            if count:
                self._count_completion(now, count, None)

    def wasted(self, response: InferResponse) -> None:
        """Count the tokens of a response that has no reader."""
        usage = response.usage
        if usage is not None:
            for each in (self.account, self.reader):
                if each is not None:
                    each.wasted(usage)
            self.statistics.completion_tokens += usage.completion_tokens
            self.statistics.waste(usage.completion_tokens)

    def taken(self) -> None:
        """Record that the frontend has the first response; time outside the engine is overhead."""
        now, engine_ns = time.perf_counter_ns(), self._first_ns - self.started_ns
        self.statistics.overhead.observe(max(0, now - self.received_ns - engine_ns) / NS_PER_SECOND)

    def ended(self, error: InferenceError | None) -> None:
        """Count the request as a success or a failure."""
        now = self.ended_ns = time.perf_counter_ns()
        self.failure = None if error is None else (error.code, error.message)
        if self.account is not None:
            self.account.ended(self, error)
        if error is not None:
            self.statistics.refuse(error)
            if self.started_ns and not self._first_ns:
                self._answer_error(now)
        if not self.started_ns:
            self.statistics.pending -= 1
            self._fail(now, error)
        elif error is not None:
            self._fail_or_answer(now, error)
        elif self._hit_ns:
            self._succeed_from_cache(now)
        else:
            self._succeed(now)
        if self.trace is not None:
            self._trace_end(self.trace, now, error)
        self._on_end(self)

    def _fail_or_answer(self, now: int, error: InferenceError) -> None:
        """Count an error that the model answered as a success; a member's fails an ensemble."""
        if not isinstance(error, AnsweredError) or self.statistics.composed:
            self._fail(now, error)
            return
        self._count_failed_response(now, error)
        self._succeed(now)

    def _answer_error(self, now: int) -> None:
        """Count an error in place of the first response as the first response."""
        self.statistics.first_response_ms.observe((now - self.received_ns) // 1_000_000)
        if self.trace is not None:
            self.trace.answered(now)

    def _trace_end(self, trace: Trace, now: int, error: InferenceError | None) -> None:
        self.trace = None  # the ledger and receipts have records of requests that have ended
        if trace.generated is not None:
            tokens = self.prompt_tokens, self.completion_tokens
            trace.generated.usage = Usage(*tokens, cached_tokens=self.cached_tokens)
        started_ns = 0 if self._hit_ns or self.statistics.composed else self.started_ns
        phases, elapsed_ns = self.phases, now - started_ns
        if phases is None or phases.input_ns + phases.infer_ns + phases.output_ns > elapsed_ns:
            phases = within(phases, elapsed_ns)
        trace.ended(now, error, started_ns, phases)

    def _count_response(self, now: int, output_ns: int, *, has_outputs: bool) -> None:
        """Count one response of several; its time is from the previous response."""
        index, rows = self._answers, self.statistics.responses
        self._answers += 1
        if index >= MAX_RESPONSE_ROWS or rows is None:
            return
        row = rows[index] if index < len(rows) else self.statistics.response(index)
        if row is None:
            return
        elapsed = now - self._last_ns
        self._last_ns = now
        if has_outputs:
            # As `add` of each, without a call for each token.
            infer, output, success = row.compute_infer, row.compute_output, row.success
            infer.count += 1
            infer.ns += max(0, elapsed - output_ns)
            output.count += 1
            output.ns += output_ns
            success.count += 1
            success.ns += elapsed
        else:
            row.compute_infer.add(max(0, elapsed - output_ns))
            row.empty_response.add(elapsed)

    def _count_completion(self, now: int, tokens: int, usage: Usage | None) -> None:
        """Count the tokens of a response; their time is from the previous ones."""
        statistics = self.statistics
        if tokens:
            statistics.completion_tokens += tokens
            self.completion_tokens += tokens
            if self._last_tokens_ns:
                gap = (now - self._last_tokens_ns) / NS_PER_SECOND / tokens
                statistics.inter_token.observe(gap)
            else:
                elapsed = (now - self.received_ns) / NS_PER_SECOND
                statistics.first_token.observe(elapsed, self.trace, now)
            self._last_tokens_ns = now
        if self.reader is not None:
            self.reader.counted(self, usage)

    def _succeed(self, now: int) -> None:
        statistics = self.statistics
        if statistics.composed:
            # Members execute concurrently: the sum of their phases may exceed the elapsed time.
            phases = self.phases or Phases()
            statistics.executed(self.batch_size, phases)
        else:
            phases = within(self.phases, now - self.started_ns)
        statistics.inference_count += self.batch_size
        count_each(
            (statistics.success, now - self.received_ns),
            (statistics.queue, self.started_ns - self.submitted_ns),
            (statistics.compute_input, phases.input_ns),
            (statistics.compute_infer, phases.infer_ns),
            (statistics.compute_output, phases.output_ns),
        )
        if statistics.summaries is not None:
            queue_ns = self.started_ns - self.submitted_ns
            statistics.summaries.succeeded(now - self.received_ns, queue_ns, phases)

    def _succeed_from_cache(self, now: int) -> None:
        statistics, queue_ns = self.statistics, self.started_ns - self.submitted_ns
        statistics.success.add(now - self.received_ns)
        statistics.queue.add(max(0, queue_ns))
        statistics.cache_hit.add(self._hit_ns)
        if statistics.summaries is not None:
            statistics.summaries.succeeded(now - self.received_ns, queue_ns, self._hit_ns)

    def _fail(self, now: int, error: InferenceError | None) -> None:
        statistics = self.statistics
        started = bool(self.started_ns) and not statistics.composed
        statistics.fail.add(now - self.received_ns)
        statistics.failures[failure_reason(error, started=started)] += 1
        if started:
            self._count_failed_response(now, error)

    def _count_failed_response(self, now: int, error: InferenceError | None) -> None:
        row = self.statistics.response(self._answers)
        if row is None:
            return
        if error is not None and error.code is Code.CANCELLED:
            row.cancel.add(0)
        else:
            row.compute_infer.add(now - self._last_ns)
            row.fail.add(now - self._last_ns)


class RequestsInFlight(dict[Record, ResponseStream]):
    """The requests of one model that have not ended, the oldest first; only `add` adds one.

    `busy_poll`, `of_tenants`, `rows` count them; it `polls` after. Without any `on_idle` is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.busy_poll: BusyPoll | None = None
        self.polls, self.rows = True, 0
        self.on_idle: Callable[[], None] | None = None
        self.of_tenants = TenantsInFlight()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, record: Record, stream: ResponseStream, tenant: str | None = None) -> None:
        """Add an accepted request; it counts for the tenant, wherever it is, until its end."""
        self[record] = stream
        self.rows += record.batch_size
        if tenant is not None:
            record.tenant = tenant
            self.of_tenants[tenant] = self.of_tenants.get(tenant, 0) + 1
        if self.busy_poll is not None:
            self.busy_poll.began()
        self._idle.clear()

    def remove(self, record: Record) -> None:
        """Remove a request that has ended."""
        del self[record]
        self.rows -= record.batch_size
        if record.tenant is not None:
            self.of_tenants.ended(record.tenant)
        if self.busy_poll is not None:
            self.busy_poll.ended(polls=self.polls)
        if not self:
            self._idle.set()
            if self.on_idle is not None:
                self.on_idle()

    def abandon(self, error: InferenceError) -> None:
        """End every request with this error, which says of none in execution that it was not."""
        for record, stream in tuple(self.items()):
            stream.abandon(error.again() if record.started_ns else error)

    async def drained(self) -> None:
        """Wait until there is no request."""
        await self._idle.wait()

    def oldest_secs(self) -> float:
        """The age of the oldest request, in seconds; 0 if there is none."""
        record = next(iter(self), None)
        return 0.0 if record is None else (time.perf_counter_ns() - record.submitted_ns) / 1e9
