"""One loaded version of a model: what serves its requests, and what keeps it serving."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.backend import Instance
from gateway.cache.cache import ResponseCache, load_key
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS, Checked, InferRequest
from gateway.models.cached_request import CachedRequest, ModelCache
from gateway.models.choice import build_scheduler
from gateway.models.crew import Crew
from gateway.models.gate import Gate
from gateway.models.labels import Labels
from gateway.models.limits import ConversationLimits, Limits
from gateway.models.slots import Slot
from gateway.models.validation import RequestRules
from gateway.models.wakefulness import Wakefulness
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.observability.trace import Trace
from gateway.openai_exchange import further_names
from gateway.schedulers.execution import Entry, Execution
from gateway.stream import ResponseStream
from gateway.threads import Threads

log = logging.getLogger("sluice.model")


class Model:
    """A loaded version: its config, instances, scheduler, statistics and requests in flight.

    Each slot's `load` makes another instance when its own has died. `prepare` comes before the
    first request; one task runs `run`; `close` comes after it. `labels` are those of its outputs,
    `load_secs` is how long it took to load, `loaded_at` when that was (seconds since the epoch),
    `namespace` its repository if names are not unique. `wakefulness` is told of its requests.
    `further_names` are those that OpenAI's clients may use besides its own, `max_model_len` is how
    many tokens prompt and answer may have together: both as its instances have said, once it is
    prepared.
    `members` are the models that an ensemble calls.
    Once `retired`, it serves what it has been given, and must be given nothing more.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        slots: Sequence[Slot],
        labels: Labels = NO_PARAMETERS,
        folder: Path = Path(),
    ) -> None:
        self.config = config
        self.version = str(version)
        self.statistics = statistics
        self.labels = labels
        self.load_secs = 0.0
        self.loaded_at = 0.0
        self.further_names = further_names(config)
        self.max_model_len: int | None = None
        self.namespace = ""
        self.wakefulness = Wakefulness()
        self.retired = False
        self.members: Sequence[Model] = ()
        self._scheduler = build_scheduler(config, statistics, folder)
        self._crew = Crew(config, slots, self._scheduler, folder, statistics)
        self._limits = Limits.read(config)
        self.conversation_limits = ConversationLimits.read(config)
        self._rules = RequestRules(config)
        self._streams: dict[Record, ResponseStream] = {}
        self._cache: ModelCache | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()
        self._on_close: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.name

    @property
    def ready(self) -> bool:
        """Whether an instance is alive that takes requests; any, if none of them ever does.

        An ensemble is ready only while all of its members are.
        """
        able = self._crew.able or (self._crew.passive and bool(self._crew.instances))
        return able and (not self.members or all(member.ready for member in self.members))

    @property
    def trouble(self) -> str:
        """Why it is not ready; empty when it is."""
        if self.ready:
            return ""
        for member in self.members:
            if not member.ready:
                return f"its member '{member.name}' is not ready: {member.trouble}"
        return self._crew.trouble

    async def check_ready(self) -> None:
        """Ask the instances; InferenceError if one says that it is not ready."""
        for instance in self.instances:
            try:
                await instance.check_ready()
            except InferenceError as error:
                log.warning(
                    "Model '%s' version %s is not ready: %s",
                    *(self.name, self.version, error.message),
                )
                raise

    @property
    def executions(self) -> Iterable[Execution]:
        """The executions that have not ended."""
        return self._scheduler.executions

    def oldest_secs(self) -> float:
        """The age of the oldest request in flight, in seconds; 0 if there is none."""
        record = next(iter(self._streams), None)
        return 0.0 if record is None else (time.perf_counter_ns() - record.submitted_ns) / 1e9

    def quiet(self, since_ns: int) -> Iterator[tuple[Record, ResponseStream]]:
        """The requests in flight without progress since then, the oldest first."""
        for record, stream in self._streams.items():
            if record.submitted_ns > since_ns:
                return
            if record.progress_ns <= since_ns:
                yield record, stream

    def place_name(self, instance: Instance) -> str:
        """The name of an instance; empty if it is gone."""
        return self._crew.place_name(instance)

    def restart(self, instance: Instance, reason: str) -> None:
        """Kill an instance and load it again; its requests fail with UNAVAILABLE."""
        if self._crew.restart(instance, reason):
            self.statistics.stalls += 1

    @property
    def in_flight(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._streams)

    @property
    def instances(self) -> Iterable[Instance]:
        """The instances that are alive."""
        return self._crew.instances

    @property
    def slots(self) -> Sequence[Slot]:
        """The places for instances, filled or not."""
        return self._crew.slots

    @property
    def cached(self) -> bool:
        """Whether its answers are kept."""
        return self._cache is not None

    def use_cache(self, cache: ResponseCache, load: bytes, threads: Threads) -> None:
        """Keep answers from now on, apart from those of all loads with another identity.

        Large requests are hashed in `threads`.
        """
        self._cache = ModelCache(cache, load_key(self.name, self.version, load), threads)

    async def prepare(self, slots: Sequence[Slot] | None = None) -> None:
        """Warm up each instance and let the scheduler learn of it; InferenceError if that fails.

        `slots` are new ones for `exchange`, or else all the model was made with.
        """
        filled = self._crew.slots if slots is None else slots
        await self._crew.prepare(filled)
        for instance in (slot.instance for slot in filled if slot.instance is not None):
            self.further_names = tuple(dict.fromkeys((*self.further_names, *instance.adapters)))
            self.max_model_len = instance.max_model_len

    def exchange(self, config: ModelConfig, slots: Sequence[Slot]) -> None:
        """Go on with other instances: prepared new ones, and those to keep (in-place update).

        The config may differ in its instance groups and version policy only. In one plain step;
        what is executing on the others ends as it would have.
        """
        self.config = config
        self._crew.exchange(config, slots)

    def submit(
        self, request: InferRequest, trace: Trace | None = None, gate: Gate | None = None
    ) -> ResponseStream:
        """Check a request and hand it to the scheduler or the gate before it, in one plain step.

        A request whose answer the cache has takes no place in any queue; one with a gate is not
        looked for there. Raises InferenceError: INVALID_ARG from validation, UNAVAILABLE when no
        instance is alive or the limit of requests in flight is reached.
        """
        return self._submit(request, trace, gate, limited=True)

    def call(self, request: InferRequest) -> ResponseStream:
        """Like `submit`, for a step of an ensemble: that has a limit of requests of its own."""
        return self._submit(request, None, None, limited=False)

    def _submit(
        self, request: InferRequest, trace: Trace | None, gate: Gate | None, *, limited: bool
    ) -> ResponseStream:
        checked = request.checked
        if checked is not None and checked.rules is self._rules:
            batch_size = checked.batch_size
        else:
            batch_size = self._rules.check(request)
        self._refuse_if_unable()
        cached: CachedRequest | None = None
        if self._cache is not None and gate is None:
            gate = cached = CachedRequest(self._cache, request)
        self._admit(request, cached, limited=limited)
        if trace is None and isinstance(request.trace, Trace):
            trace = request.trace.child()
        if trace is not None:
            request = replace(request, trace=trace)
            trace.accepted(self.name, self.version, request)
        record = Record(self.statistics, batch_size, request.received_ns, self._left, trace)
        stream = ResponseStream(record if gate is None else gate.recorder(record))
        self._streams[record] = stream
        self.wakefulness.began()
        self._idle.clear()
        entry = Entry(request, stream, record)
        if gate is None:
            self._scheduler.submit(entry)
        else:
            gate.submit(entry, self._scheduler)
        return stream

    def checked(self, request: InferRequest) -> InferRequest:
        """The request, which `submit` need not check any more; any thread may call this.

        Raises InferenceError INVALID_ARG for a request that does not fit the model.
        """
        return replace(request, checked=Checked(self._rules, self._rules.check(request)))

    async def run(self, on_change: Callable[[], None]) -> None:
        """Run the scheduler, and load again what dies, until cancelled.

        `on_change` is called whenever `ready` may have changed.
        """
        await self._crew.run(on_change, self.abandon)

    def continues(self, request: InferRequest) -> bool:
        """Whether a request goes on with a sequence that has begun, and not ended."""
        return self._scheduler.continues(request)

    async def sequences_ended(self) -> None:
        """Wait until no sequence takes any more requests."""
        await self._scheduler.sequences_ended()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def hold(self) -> None:
        """Keep this version alive for who has it already, until one more `release`."""
        self._holders += 1
        self._free.clear()

    def release(self) -> None:
        """Let go."""
        self._holders -= 1
        if not self._holders:
            self._free.set()

    async def unneeded(self) -> None:
        """Wait until nobody holds it and no request is in flight."""
        while self._holders or self._streams:
            await self._free.wait()
            await self._idle.wait()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with an error."""
        for stream in tuple(self._streams.values()):
            stream.abandon(error)

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Have a plain function called once no request is left because the model is closed."""
        self._on_close.append(callback)

    def close(self) -> Awaitable[object]:
        """Begin to close the instances; what is in flight or queued ends with an error.

        Await the end. If the wait is cancelled, they still close.
        """
        self.abandon(InferenceError(Code.UNAVAILABLE, f"model '{self.name}' is being closed"))
        while self._on_close:
            self._on_close.pop()()
        return self._crew.close()

    def _refuse_if_unable(self) -> None:
        if not self._crew.able:
            raise InferenceError(
                Code.UNAVAILABLE, f"model '{self.name}' is unavailable: {self._crew.trouble}"
            )

    def _admit(self, request: InferRequest, cached: CachedRequest | None, *, limited: bool) -> None:
        """Raise UNAVAILABLE if there is no room, where the request needs any."""
        if limited and (cached is None or cached.lookup.response is None):
            self._refuse_if_full()
        if cached is None or cached.lookup.missed:
            self._scheduler.admit(request)

    def _refuse_if_full(self) -> None:
        limit = self._limits.max_in_flight
        if len(self._streams) >= limit:
            self.statistics.rejected()
            raise InferenceError(
                Code.UNAVAILABLE,
                f"model '{self.name}' has {limit} requests in flight, the most it accepts "
                "(its parameter 'max_in_flight'); retry later",
            )

    def _left(self, record: Record) -> None:
        del self._streams[record]
        self.wakefulness.ended()
        if not self._streams:
            self._idle.set()
