"""Loaded models: the task that runs, drains and closes each, and the watch for stalls.

Progress is a response, or the start of an execution.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from gateway.backend import Instance
from gateway.ensembles.backend import EnsembleInstance
from gateway.errors import Code, InferenceError
from gateway.event_loop import BusyPoll
from gateway.models.closings import Closings
from gateway.models.model import Model
from gateway.models.registry import (
    UNLOADED,
    KnownModel,
    ModelRegistry,
    VersionState,
    VersionStatus,
)
from gateway.models.repository import IN_TWO_REPOSITORIES, LoadSource
from gateway.models.residents import Residents
from gateway.observability.request_record import Record, RequestsInFlight
from gateway.schedulers.execution import Execution
from gateway.stream import ResponseStream


@dataclass(slots=True)
class _Life:
    """The end of a model: its event, and the callbacks after it."""

    ended: list[Callable[[], None]]
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False


class LoadedModels:
    """Owns every loaded model from its first request until it is closed.

    A retired model closes after its last request and its last `release`. `closings` own the closing
    of a model, so that it survives the end of the server; `residents` wake and sleep. An instance
    without progress for `stall_secs` is restarted (seconds, 0: never).
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        busy_poll: BusyPoll | None,
        closings: Closings,
        residents: Residents,
        stall_secs: float = 0.0,
    ) -> None:
        self.residents = residents
        self._on_change = on_change
        self._closings = closings
        self._stall_secs = stall_secs
        self._busy_poll = busy_poll
        self._lives: dict[Model, _Life] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Own models inside the block, which ends cancelled; then close all of them."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                watch = ProgressWatch(self._stall_secs)
                self._tasks.create_task(watch.run(lambda: self._lives, time.perf_counter_ns))
                self._tasks.create_task(self.residents.run())
                yield
        finally:
            for model in tuple(self._lives):  # some tasks have not started
                self._begin_end(model)
            await self._closings.ended()

    def start(self, model: Model, ended: Callable[[], None]) -> None:
        """Run a prepared model; `ended` is called when it has been closed."""
        assert self._tasks is not None  # noqa: S101 - nothing is loaded outside the block
        model.requests.busy_poll = self._busy_poll
        model.count_processes()
        self._lives[model] = _Life([ended])
        if model.waking is not None or model.members:
            self.residents.begin(model)
        self._tasks.create_task(self._live(model, self._lives[model]))

    def retire(self, model: Model, ended: Callable[[], None]) -> None:
        """End a model after its last request; no request may be submitted any more."""
        model.retired = True
        if model.waking is not None:
            self.residents.retire(model)
        life = self._lives[model]
        life.ended.append(ended)
        life.retired.set()

    @property
    def in_flight(self) -> int:
        """Requests in flight in all models, retired models included."""
        return sum(len(model.requests) for model in self._lives)

    def requests(self) -> Iterator[tuple[Model, ResponseStream]]:
        """The requests in flight in all models, retired models included."""
        for model in tuple(self._lives):
            for stream in tuple(model.requests.values()):
                yield model, stream

    async def sequences_ended(self) -> None:
        """Wait until no sequence of a model in service accepts more requests."""
        for model in tuple(self._lives):
            if not model.retired and model.scheduler.sequences is not None:
                await model.scheduler.sequences.ended()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        for model in tuple(self._lives):
            await model.requests.drained()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with this error."""
        for model in tuple(self._lives):
            model.requests.abandon(error)

    async def _live(self, model: Model, life: _Life) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                executing = self._closings.run(
                    model.run(self._on_change),
                    lambda: [each.instance for each in model.scheduler.executions],
                    model.name,
                )
                running = tasks.create_task(executing)
                await life.retired.wait()
                await model.unneeded()
                running.cancel()
        finally:
            self._begin_end(model)

    def _begin_end(self, model: Model) -> None:
        life = self._lives.get(model)
        if life is not None and not life.closing:
            life.closing = True
            self._closings.adopt(self._end(model, life))

    async def _end(self, model: Model, life: _Life) -> None:
        try:
            await model.close()
        finally:
            del self._lives[model]
            if model.waking is not None or model.members:
                self.residents.end(model)
            for callback in life.ended:
                callback()


class ServedVersions:
    """Begins and ends versions in the registry, each time in one synchronous step."""

    def __init__(self, registry: ModelRegistry, loaded: LoadedModels) -> None:
        self._registry = registry
        self._loaded = loaded

    def drop(self, known: KnownModel, reason: str) -> None:
        """End every version of the model."""
        for status in known.versions.values():
            self.retire(status, reason)
        known.source = known.seen = None
        known.bound = frozenset()
        known.trouble = ""
        self._registry.notify()

    def drop_some(self, known: KnownModel, versions: frozenset[int]) -> bool:
        """End these versions, if others of the model serve; whether that is so.

        The others stay until a load that names no versions. Raises NOT_FOUND for a version that
        the model does not have, UNAVAILABLE for one that is held.
        """
        source, left = known.source, known.loaded - versions
        if source is None:
            return False
        source.entry.require(versions)
        for number in sorted(versions & known.held & known.loaded):
            raise InferenceError(
                Code.UNAVAILABLE,
                f"version {number} of model '{known.id.name}' is part of a rollout; end the "
                "rollout first",
            )
        if left:
            for number in versions & known.versions.keys():
                self.retire(known.versions[number], UNLOADED)
            known.source = replace(source, chosen=left)
            self._registry.notify()
        return bool(left)

    def start(self, known: KnownModel, source: LoadSource, model: Model) -> None:
        """Serve with a loaded version from now on; it replaces none."""
        known.versions[int(model.version)] = VersionStatus(VersionState.READY, model=model)
        model.namespace = known.id.namespace
        if source.upload is not None:
            source.upload.hold()
        self._loaded.start(model, source.upload.release if source.upload else lambda: None)

    def note_unreadable(self, known: KnownModel, error: InferenceError) -> None:
        """Keep the reason why a model cannot be read; versions that serve continue to serve."""
        is_ambiguous = error.message == IN_TWO_REPOSITORIES
        if is_ambiguous:
            self.drop(known, error.message)
        if not known.models:
            known.versions.clear()
            known.trouble = error.message if is_ambiguous else error.reason
            known.readable = False
        self._registry.notify()

    def retire(self, status: VersionStatus, reason: str) -> None:
        """Stop new requests for a version; its reason is set once it has ended."""

        def ended() -> None:
            status.state, status.reason = VersionState.UNAVAILABLE, reason
            self._registry.notify()

        if status.model is not None:
            model, status.model = status.model, None
            status.state = VersionState.UNLOADING
            self._loaded.retire(model, ended)
        elif status.state is not VersionState.UNLOADING:
            ended()


log = logging.getLogger("sluice.progress")

NS_PER_SEC = 1_000_000_000
LOOK_SECS = 5.0
LOOKS_PER_STALL = 4
QUIET_SECS = 60.0
"""A request without progress for this time is logged (seconds)."""
REMIND_SECS = 600.0
"""It is logged again after this time (seconds)."""


class ProgressWatch:
    """Checks every model periodically; restarts stalled instances if `stall_secs` is not 0.

    An instance stalls while it executes and none of its executions makes progress. An execution
    that waits for a reader or for another model does not count.
    """

    def __init__(self, stall_secs: float = 0.0) -> None:
        self._stall_secs = stall_secs
        self._logged: dict[Record, int] = {}

    async def run(self, models: Callable[[], Iterable[Model]], clock_ns: Callable[[], int]) -> None:
        """Check periodically until cancelled."""
        pause = LOOK_SECS
        if self._stall_secs:
            pause = min(pause, self._stall_secs / LOOKS_PER_STALL)
        while True:
            await asyncio.sleep(pause)
            self.look(models(), clock_ns())

    def look(self, models: Iterable[Model], now_ns: int) -> None:
        """Log and restart requests and instances without progress."""
        logged: dict[Record, int] = {}
        for model in models:
            try:
                if self._stall_secs:
                    self._restart_stalled(model, now_ns)
                logged |= self._log_quiet(model, now_ns)
            except Exception:
                # Around one model: its defect must stop neither the watch nor the server.
                log.exception("progress check failed", extra={"model": model.name})
        self._logged = logged

    def _restart_stalled(self, model: Model, now_ns: int) -> None:
        since_ns = now_ns - round(self._stall_secs * NS_PER_SEC)
        for instance in stalled(model.scheduler.executions, since_ns):
            model.instances.restart(instance, f"it has made no progress for {self._stall_secs:g} s")

    def _log_quiet(self, model: Model, now_ns: int) -> dict[Record, int]:
        """Log the oldest request without progress; returns the times of logs."""
        quiet = list(quiet_since(now_ns - round(QUIET_SECS * NS_PER_SEC), model.requests))
        logged = {record: self._logged[record] for record, _ in quiet if record in self._logged}
        if quiet:
            record, stream = quiet[0]
            logged_ns = logged.get(record)
            if logged_ns is None or now_ns - logged_ns >= REMIND_SECS * NS_PER_SEC:
                logged[record] = now_ns
                extra = {
                    "model": model.name,
                    "version": model.version,
                    "secs": (now_ns - record.progress_ns) // NS_PER_SEC,
                    "waits_for": waits_for(model, record, stream),
                    "requests": len(quiet),
                }
                log.warning("request without progress", extra=extra)
        return logged


def quiet_since(
    since_ns: int, requests: RequestsInFlight
) -> Iterator[tuple[Record, ResponseStream]]:
    """The requests without progress since that time, the oldest first."""
    for record, stream in requests.items():
        if record.submitted_ns > since_ns:
            return
        if record.progress_ns <= since_ns:
            yield record, stream


def stalled(executions: Iterable[Execution], since_ns: int) -> Iterator[Instance]:
    """The instances that execute without any progress since that time."""
    by_instance: dict[Instance, list[Execution]] = {}
    for execution in executions:
        if execution.progress_ns:
            by_instance.setdefault(execution.instance, []).append(execution)
    for instance, found in by_instance.items():
        if max(each.progress_ns for each in found) > since_ns:
            continue
        if not any(each.held_back or _members(each) for each in found):
            yield instance


def waits_for(model: Model, record: Record, stream: ResponseStream) -> str:
    """The thing that a request waits for, in words."""
    if stream.full:
        return "its reader"
    execution = next((each for each in model.scheduler.executions if _has(each, record)), None)
    if execution is None:
        return "the queue"
    if execution.held_back:
        return "the reader of another request in its batch"
    if members := _members(execution):
        return f"model {', '.join(members)}"
    return f"instance {model.instances.name(execution.instance)}"


def _has(execution: Execution, record: Record) -> bool:
    return any(entry.record is record for entry in execution.entries)


def _members(execution: Execution) -> Sequence[str]:
    instance = execution.instance
    if isinstance(instance, EnsembleInstance):
        return sorted(set(instance.members_of([each.request for each in execution.entries])))
    return sorted(set(instance.waits_for))
