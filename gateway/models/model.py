"""One loaded version of a model, from the acceptance of a request to its stream."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gateway.cache.cache import ResponseCache, load_key
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, RetryLater
from gateway.generation import generates_text
from gateway.messages import NO_PARAMETERS, Checked, InferRequest
from gateway.models.cached_request import CachedRequest, ModelCache
from gateway.models.golden_results import GoldenResult
from gateway.models.instance_groups import InstanceSlot
from gateway.models.instances import Instances
from gateway.models.limits import ConversationLimits, Limits
from gateway.models.model_folder import Labels
from gateway.models.request_validation import RequestRules
from gateway.models.sharing import Sharing, in_force, shared_among
from gateway.models.taps import Allowed, Interceptor, Tapper, Waking
from gateway.observability.request_record import Record, RequestsInFlight
from gateway.observability.statistics import ModelStatistics
from gateway.observability.stream_tap import Tap
from gateway.observability.trace import Trace
from gateway.openai_contract import further_names
from gateway.policy.caller import tenant_of
from gateway.policy.tenants import Tenants
from gateway.schedulers.execution import Entry
from gateway.schedulers.scheduler import DirectScheduler, Scheduler
from gateway.storage.mirror.trees import RemoteTree
from gateway.stream import ResponseStream
from gateway.threads import Threads

log = logging.getLogger("sluice.model")


def import_scheduler(config: ModelConfig) -> Callable[[ModelStatistics, Path], Scheduler]:
    """The constructor of a config's scheduler; blocks for 10 ms at its first import.

    A server without batching does without these 0.6 MiB.
    """
    if config.dynamic_batching is not None:
        from gateway.schedulers.dynamic import DynamicScheduler

        batching = config.dynamic_batching
        return lambda statistics, folder: DynamicScheduler(config, batching, statistics)
    if config.sequence_batching is not None:
        from gateway.sequences.scheduler import SequenceScheduler

        return partial(SequenceScheduler, config, config.sequence_batching)
    return lambda statistics, folder: DirectScheduler(statistics)


def build_scheduler(
    config: ModelConfig, statistics: ModelStatistics, folder: Path = Path()
) -> Scheduler:
    """The scheduler of one loaded version; `folder` is the model's."""
    return import_scheduler(config)(statistics, folder)


class VersionChooser(Protocol):
    """Shares the requests of a model without a version among two of its versions.

    `has_keys`: headers, or members of OpenAI's, may decide the version.
    """

    has_keys: bool

    def choose(self, request: InferRequest) -> tuple["Model", Tap | None]:
        """The version for a request, and its tap if it is observed."""

    def pins(self, model: "Model") -> bool:
        """Whether a version of the two stays in memory once it is awake."""

    def refused(self, request: InferRequest, model: "Model", error: InferenceError) -> None:
        """Note that the chosen version has refused a request."""

    def keyed(
        self,
        request: InferRequest,
        header: Callable[[str], str | None],
        members: Mapping[str, Any] = NO_PARAMETERS,
    ) -> InferRequest:
        """The request with the headers, and members of OpenAI's, that may decide its version."""


class Model:
    """A loaded version: its config, instances, scheduler, statistics and requests in flight.

    Call `prepare` before the first request; one task runs `run`; call `close` after it. Each slot's
    `load` replaces an instance that has died. `labels` are those of its outputs, `load_secs` is the
    duration of its load, `loaded_at` its time (seconds since the epoch), `namespace` its repository
    if names are not unique. `further_names` are names for OpenAI's clients besides its own;
    `max_model_len` is the largest number of tokens of prompt and answer together. Its instances set
    both in `prepare`. It accepts `most_in_flight` requests at a time, whose first response is due
    after `max_wait_ns`, 0 for any time. `members` are the models that an ensemble calls. `golden`
    are the results of its golden requests; `recorder` makes new ones. `waking` wakes it if it
    sleeps. A model in a rollout has a `chooser`. A `retired` model completes its requests and must
    get no others. A model `of_fleet` is hosted by replicas, which keep its sequences and
    conversations. `fair` shares it among `tenants`, which may have `allowances`. One that
    `generates_text` has a contract of texts.
    """

    of_fleet: bool = False
    chooser: VersionChooser | None = None

    def __init__(  # noqa: PLR0913 - the parts of a version, each by its name
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        slots: Sequence[InstanceSlot],
        labels: Labels = NO_PARAMETERS,
        folder: Path = Path(),
        tenants: Tenants | None = None,
    ) -> None:
        self.name, self.config, self.version = config.name, config, str(version)
        self.decoupled, self.generates_text = config.decoupled, generates_text(config)
        self.statistics, self.labels = statistics, labels
        self.load_secs = self.loaded_at = 0.0
        self.golden: Sequence[GoldenResult] = ()
        self.recorder: Tapper | None = None
        self.further_names = further_names(config)
        self.max_model_len: int | None = None
        self.namespace, self.retired = "", False
        self.members: Sequence[Model] = ()
        self.waking: Waking | None = None
        self.tree: RemoteTree | None = None
        self.requests = RequestsInFlight()
        self.allowances: dict[str, Allowed] = {}
        self.scheduler = self._scheduler(statistics, folder)
        self.fair: Sharing | None = None
        if tenants is not None:
            counts = self.requests.of_tenants
            self.scheduler, self.fair = shared_among(tenants, self.scheduler, config, counts)
        self.instances = Instances(config, slots, self.scheduler, folder, statistics)
        limits = Limits.read(config)
        self.most_in_flight, self.max_wait_ns = limits.max_in_flight, limits.max_wait_ns
        self.conversation_limits = ConversationLimits.read(config)
        self._rules = RequestRules(config)
        self._cache: ModelCache | None = None
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()
        self._on_close: list[Callable[[], None]] = []

    def _scheduler(self, statistics: ModelStatistics, folder: Path) -> Scheduler:
        return build_scheduler(self.config, statistics, folder)

    @property
    def ready(self) -> bool:
        """Whether an instance is alive that takes requests, or any if all are passive.

        An ensemble is ready only while all of its members are.
        """
        ready = self.instances.ready
        return ready and (not self.members or all(member.ready for member in self.members))

    @property
    def trouble(self) -> str:
        """The reason why it is not ready; empty when it is."""
        if self.ready:
            return ""
        for member in self.members:
            if not member.ready:
                return f"its member '{member.name}' is not ready: {member.trouble}"
        return self.instances.trouble

    @property
    def takes_requests(self) -> bool:
        """Whether a version that is ready gets the requests without a version."""
        return not self.members or self.ready

    async def check_ready(self) -> None:
        """Check the instances; raises the InferenceError of one that is not ready."""
        for instance in self.instances:
            try:
                await instance.check_ready()
            except InferenceError as error:
                text = "Model '%s' version %s is not ready: %s"
                log.warning(text, self.name, self.version, error.message)
                raise

    @property
    def cached(self) -> bool:
        """Whether its responses are cached."""
        return self._cache is not None

    def use_cache(self, cache: ResponseCache, load: bytes, threads: Threads) -> None:
        """Cache responses from now on; `load` is part of their keys.

        Large requests are hashed in `threads`.
        """
        self._cache = ModelCache(cache, load_key(self.name, self.version, load), threads)

    async def prepare(self, slots: Sequence[InstanceSlot] | None = None) -> None:
        """Warm up each instance and add it to the scheduler; InferenceError if that fails.

        `slots` are new slots for `exchange`; the default is all slots.
        """
        filled = self.instances.slots if slots is None else slots
        await self.instances.prepare(filled)
        for instance in (slot.instance for slot in filled if slot.instance is not None):
            self.describe(instance.adapters, instance.max_model_len)

    def describe(self, adapters: Sequence[str], max_model_len: int | None) -> None:
        """Set what only its instances know."""
        self.further_names = tuple(dict.fromkeys((*self.further_names, *adapters)))
        self.max_model_len = max_model_len

    async def wake(self) -> None:
        """Load the instances of a version that is asleep; InferenceError if that fails."""
        await self.instances.wake()
        for instance in self.instances:
            self.describe(instance.adapters, instance.max_model_len)
        self.count_processes()

    def count_processes(self) -> None:
        """Poll after its requests only if no other process executes them.

        A process that wakes for each request costs more than a wake-up of the loop.
        """
        self.requests.polls = not any(each.has_process for each in self.instances)

    def exchange(self, config: ModelConfig, slots: Sequence[InstanceSlot]) -> None:
        """Serve with other instances: newly prepared slots and kept ones (in-place update).

        The config may differ in its instance groups and version policy only. One synchronous step;
        the other instances complete their executions.
        """
        self.config = config
        self.instances.exchange(config, slots)

    def submit(
        self,
        request: InferRequest,
        trace: Trace | None = None,
        interceptor: Interceptor | None = None,
        *,
        tap: Tap | None = None,
        limited: Allowed | bool = True,
    ) -> ResponseStream:
        """Check a request and pass it to the interceptor, or to the scheduler, in one step.

        A request that the cache can answer takes no place in a queue. The cache is not asked for a
        request with an interceptor, or of a sequence at a replica. `tap` observes the request.
        Raises InferenceError: INVALID_ARG from validation, UNAVAILABLE if no instance is alive or,
        if `limited` without an allowance, too many requests are in flight.
        """
        checked = request.checked
        if checked is not None and checked.rules is self._rules:
            batch_size = checked.batch_size
        else:
            batch_size = self._rules.check(request)
        waking = None if self.instances.able else self._waking_if_asleep()
        cached: CachedRequest | None = None
        has_order = self.of_fleet and request.sequence is not None
        if self._cache is not None and interceptor is None and not has_order:
            interceptor = cached = CachedRequest(self._cache, request)
        has_response = cached is not None and cached.lookup.response is not None
        if waking is not None and not has_response:
            waking.check()
        allowance = None if isinstance(limited, bool) else limited
        fair, is_counted = self.fair, limited and not (has_response or allowance)
        scheduler = self.scheduler if fair is None or allowance is None else fair.inner
        shared = None if fair is None or allowance or not fair.tenants.configured else fair
        if is_counted and (shared or len(self.requests) >= self.most_in_flight):
            self._check_in_flight(request, self.statistics)
        if cached is None or cached.lookup.missed:
            scheduler.admit(request)
        parent = request.trace
        trace = parent.child() if trace is None and isinstance(parent, Trace) else trace
        if trace is not None:
            request.trace = trace  # type: ignore[misc]  # as `Execution` sets `sink`
            trace.accepted(self.name, self.version, request)
        ended = self.requests.remove
        record = Record(self.statistics, batch_size, request.received_ns, ended, trace, allowance)
        if request.receipt is not None:
            request.receipt.accepted(request, self.version, record)
        account = record if interceptor is None else interceptor.recorder(record, record)
        stream = ResponseStream(account if tap is None else tap.recorder(record, account))
        self.requests.add(record, stream, None if shared is None else tenant_of(request.caller))
        entry = Entry(request, stream, record)
        if interceptor is None:
            scheduler.submit(entry)
        else:
            interceptor.submit(entry, scheduler)
        if waking is not None and not stream.done:
            waking.wish(stream)
        return stream

    def call(self, request: InferRequest, *, limited: bool = False) -> ResponseStream:
        """As `submit`, for a request of another model; refusals count. An ensemble has limits."""
        if request.uncounted:
            return self.copy(request, ModelStatistics.of(self.config), limited=limited)
        try:
            return self.submit(request, limited=limited)
        except InferenceError as error:
            self.statistics.refuse(error)
            raise

    def copy(
        self,
        request: InferRequest,
        statistics: ModelStatistics,
        tap: Tap | None = None,
        *,
        limited: bool = True,
    ) -> ResponseStream:
        """As `submit`, for a request that the server makes of a client's, or of a file.

        It counts in `statistics` instead of the model's, and has neither trace nor cached response.
        """
        batch_size = self._rules.check(request)
        waking = None if self.instances.able else self._waking_if_asleep()
        if waking is not None:
            waking.check()
        shared = in_force(self.fair)
        if limited:
            self._check_in_flight(request, statistics)
        self.scheduler.admit(request)
        record = Record(statistics, batch_size, 0, self.requests.remove)
        stream = ResponseStream(record if tap is None else tap.recorder(record, record))
        self.requests.add(record, stream, None if shared is None else tenant_of(request.caller))
        self.scheduler.submit(Entry(request, stream, record))
        if waking is not None and not stream.done:
            waking.wish(stream)
        return stream

    def checked(self, request: InferRequest) -> InferRequest:
        """The request, marked as checked for `submit`; callable from any thread.

        Raises InferenceError INVALID_ARG for a request that does not fit the model.
        """
        return replace(request, checked=Checked(self._rules, self._rules.check(request)))

    async def run(self, on_change: Callable[[], None]) -> None:
        """Run the scheduler, and restart instances that die, until cancelled.

        `on_change` is called whenever `ready` may have changed.
        """
        await self.instances.run(on_change, self.requests.abandon)

    def hold(self) -> None:
        """Keep this version alive until one more `release`."""
        self._holders += 1
        self._free.clear()

    def release(self) -> None:
        """Release a `hold`."""
        self._holders -= 1
        if not self._holders:
            self._free.set()

    async def unneeded(self) -> None:
        """Wait until no `hold` is left and no request is in flight."""
        while self._holders or self.requests:
            await self._free.wait()
            await self.requests.drained()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call a synchronous function once the model is closed and no request is left."""
        self._on_close.append(callback)

    def close(self) -> Awaitable[object]:
        """Begin to close the instances; requests in flight or queued end with an error.

        Await the end. If the wait is cancelled, they still close.
        """
        error = InferenceError(Code.UNAVAILABLE, f"model '{self.name}' is being closed")
        self.requests.abandon(error)
        if self.recorder is not None:
            self.recorder.end("the version was unloaded")
        while self._on_close:
            self._on_close.pop()()
        return self.instances.close()

    def _waking_if_asleep(self) -> Waking:
        """Raises UNAVAILABLE unless requests may wait for instances."""
        if self.waking is None or not self.instances.asleep:
            error = RetryLater(f"model '{self.name}' is unavailable: {self.instances.trouble}")
            error.lacks_instance = True
            raise error
        return self.waking

    def _check_in_flight(self, request: InferRequest, statistics: ModelStatistics) -> None:
        """Raise UNAVAILABLE if too many requests are in flight, of all or of the tenant."""
        total, most, refusal = len(self.requests), self.most_in_flight, None
        if (fair := self.fair) is not None and fair.tenants.configured:  # as `in_force`
            refusal = fair.refusal(request, most, total)
        elif total >= most:
            text = f"model '{self.name}' has {most} requests in flight, the most it accepts"
            refusal = RetryLater(f"{text} (its parameter 'max_in_flight'); retry later")
        if refusal is not None:
            statistics.rejected()
            raise refusal
