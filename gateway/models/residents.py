"""The models of a server that share its memory: one task has them wake and sleep."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from gateway.errors import Code, InferenceError, RetryLater
from gateway.memory_settings import ModelMemory
from gateway.models.kept_facts import FactsFolder, KeptFacts, VersionFiles
from gateway.models.limits import ResidenceRules, Residency, SleepLevel
from gateway.models.memory import LoadMeasures, LoadStart, budget_of, file_bytes, needs_of
from gateway.models.model import Model
from gateway.models.residence import HOST, Change, Residence, Resident, Stage, Verb
from gateway.models.version_usage import VersionUsage
from gateway.stream import ResponseStream
from gateway.threads import Threads

log = logging.getLogger("sluice.residence")

NS_PER_SEC = 1_000_000_000


class Waker:
    """A version in memory, or asleep. Implements `Waking`.

    `size` is that of its files, `measured` the most memory that was measured. A load under way is
    expected to end at `expected_at`; `began` is the begin of its first one. The future `end` is
    that of its next wake, or of its wait for room: None, or the error.
    """

    def __init__(
        self, residents: "Residents", resident: Resident, folder: Path, load: str, size: int
    ) -> None:
        self.resident = resident
        self.folder = folder
        self.load = load
        self.size = size
        self.measured: dict[str, int] = {}
        self.began: LoadStart | None = None
        self.expected_at: float | None = None
        self.end: asyncio.Future[InferenceError | None] | None = None
        self._residents = residents

    def check(self) -> None:
        refusal = self._residents.residence.refusal(self.resident)
        if refusal is not None:
            raise refusal

    def wish(self, stream: ResponseStream) -> None:
        secs = self.resident.load_secs or math.inf
        stream.model_at = self.expected_at or asyncio.get_running_loop().time() + secs
        self._residents.wish(self.resident)

    def report(self, error: InferenceError | None) -> None:
        """End the waits for its wake."""
        end, self.end = self.end, None
        if end is not None:
            end.set_result(error)

    def late(self) -> RetryLater:
        """The error of a request that has waited for as long as it may."""
        resident = self.resident
        if resident.stage is not Stage.WAKING:
            return self._residents.residence.no_room(resident)
        text = (
            f"model '{resident.name}' is being loaded into memory, and a request waits for "
            f"{resident.rules.wake_secs} s at most ('wake_secs')"
        )
        return RetryLater(text, resident.retry_secs)


class Residents:
    """Wakes models for requests, and has them sleep, as a `Residence` decides. One task runs it.

    `admit` comes before `begin`, `end` last. `woken` and `failed` count wakes, `wake_secs` is the
    duration of the former together; `evictions` counts by reason. `on_change` is called when a
    model has woken or is asleep.
    """

    def __init__(
        self,
        budget: ModelMemory,
        threads: Threads,
        facts: FactsFolder,
        on_change: Callable[[], None],
    ) -> None:
        self._budget = budget
        self._threads = threads
        self._facts = facts
        self._on_change = on_change
        self.residence = Residence(budget_of(budget), lambda: asyncio.get_running_loop().time())
        self.models: dict[Resident, tuple[Model, Waker]] = {}
        self.woken = self.failed = 0
        self.wake_secs = 0.0
        self.evictions: Counter[str] = Counter()
        self._ensembles: dict[Model, VersionUsage] = {}
        self._changed = asyncio.Event()
        self._measures = LoadMeasures(threads, tuple(budget.gpus))

    # Versions.

    async def admit(self, model: Model, files: VersionFiles) -> bool:
        """Read the rules of a version that is about to be loaded; whether it may sleep.

        Raises INVALID_ARG if they are wrong, or if it is larger than the budget.
        """
        rules = ResidenceRules.read(model.config, on_demand=self._budget.on_demand)
        sleeps = rules.residency is not Residency.ALWAYS
        if not (sleeps or self.residence.budget):
            return False
        load, facts, size = await self._threads.run(self._read, files)
        measured = {} if facts is None else facts.memory
        needs = needs_of(model.config, rules, self._budget.gpus, size, measured)
        if refusal := self.residence.refusal_of_size(model.name, needs):
            raise InferenceError(Code.INVALID_ARG, refusal)
        usage = VersionUsage(model)
        resident = Resident(model.name, rules, needs, usage)
        if rules.sleep is SleepLevel.LEVEL_1:
            resident.rests = {HOST: size}
        model.waking = waker = Waker(self, resident, files.folder, load, size)
        waker.measured = dict(measured)
        if facts is not None and sleeps:
            resident.load_secs = model.load_secs = facts.load_secs
            model.describe(facts.adapters, facts.max_model_len)
        return sleeps

    def _read(self, files: VersionFiles) -> tuple[str, KeptFacts | None, int]:
        load = files.identify().hex()
        return load, self._facts.read(files.folder, load), file_bytes(files.folder)

    def begin(self, model: Model) -> None:
        """Take a version into account that serves from now on."""
        if model.members:
            usage = self._ensembles[model] = VersionUsage(model)
            model.requests.on_idle = partial(self._ensemble_used, model)
            for by in self._users_of(model):
                by.append(usage)
        waker = model.waking
        if isinstance(waker, Waker):
            if waker.resident.is_new:
                waker.resident.is_new = False
            else:
                self._add(model, waker, awake=not model.instances.asleep)
            if waker.resident.rules.residency is not Residency.ALWAYS:
                model.requests.on_idle = partial(self._used, waker)
            self._changed.set()

    @asynccontextmanager
    async def room(self, model: Model) -> AsyncIterator[None]:
        """Room for the instances of a version that may sleep, made as for a wake.

        Call `filled` inside the block, and `begin` or `end` after it. Raises RetryLater if there is
        no room in time. The exit never waits.
        """
        waker = model.waking
        assert isinstance(waker, Waker)  # noqa: S101 - it has been admitted
        waker.resident.is_new = True
        self._add(model, waker, awake=False)
        try:
            await self._awaken(waker)
            with self._measures.change():
                waker.began = await self._measures.begin()
                yield
        except BaseException:
            self.end(model)
            raise

    async def filled(self, model: Model) -> None:
        """Account for a version that has been loaded in its `room`."""
        waker = model.waking
        assert isinstance(waker, Waker)  # noqa: S101 - it has been admitted
        assert waker.began is not None  # noqa: S101 - it has room
        await self._note_load(model, waker, waker.began)
        self.residence.may_sleep(waker.resident)
        self._changed.set()
        await self._keep(model, waker)

    def _add(self, model: Model, waker: Waker, *, awake: bool) -> None:
        self.models[waker.resident] = (model, waker)
        self.residence.add(waker.resident, awake=awake)

    def end(self, model: Model) -> None:
        """Forget a version that has been closed."""
        usage = self._ensembles.pop(model, None)
        if usage is not None:
            for by in self._users_of(model):
                by.remove(usage)
        model.requests.on_idle = None
        waker = model.waking
        if isinstance(waker, Waker):
            self.models.pop(waker.resident, None)
            self.residence.remove(waker.resident)
            text = f"model '{model.name}' is being closed"
            waker.report(InferenceError(Code.UNAVAILABLE, text))
            self._changed.set()

    def _users_of(self, ensemble: Model) -> Iterable[list[VersionUsage]]:
        """The lists of the ensembles that call a member, for each member of an ensemble."""
        for member in ensemble.members:
            waker = member.waking
            if isinstance(waker, Waker) and isinstance(waker.resident.usage, VersionUsage):
                yield waker.resident.usage.by
            elif member in self._ensembles:
                yield self._ensembles[member].by

    async def awaken(self, models: Iterable[Model]) -> None:
        """Wake versions before a request asks for them; returns when all are awake.

        Raises InferenceError if one does not wake, RetryLater if there is no room in time.
        """
        for model in models:
            waker = model.waking
            if isinstance(waker, Waker) and waker.resident.stage is not Stage.AWAKE:
                await self._awaken(waker)

    async def _awaken(self, waker: Waker) -> None:
        waker.check()
        if waker.end is None:
            waker.end = asyncio.get_running_loop().create_future()
        self.wish(waker.resident)
        try:
            async with asyncio.timeout(waker.resident.rules.wake_secs):
                error = await asyncio.shield(waker.end)
        except TimeoutError:
            raise waker.late() from None
        if error is not None:
            raise error

    # Requests.

    def wish(self, resident: Resident) -> None:
        """Wake a version as soon as there is room."""
        self.residence.wish(resident)
        self._changed.set()

    def _used(self, waker: Waker) -> None:
        """The last request of a version has ended."""
        if self.residence.used(waker.resident):
            self._changed.set()
        if waker.end is not None:
            self.wish(waker.resident)

    def _ensemble_used(self, ensemble: Model) -> None:
        """The last request of an ensemble has ended, and with it the use of its members."""
        for member in ensemble.members:
            waker = member.waking
            if not isinstance(waker, Waker):
                self._ensemble_used(member)
            elif waker.resident.stage is Stage.AWAKE and self.residence.used(waker.resident):
                self._changed.set()

    def _end_late(self) -> float:
        """End the requests that have waited for too long; returns the time of the next one."""
        now, now_ns = asyncio.get_running_loop().time(), time.perf_counter_ns()
        next_at = math.inf
        for resident, (model, waker) in tuple(self.models.items()):
            if resident.stage is Stage.AWAKE:
                continue
            most_ns = resident.rules.wake_secs * NS_PER_SEC
            _end_waiting(model, waker.late, now_ns - most_ns)
            waiting = (each for each in model.requests if not each.has_begun)
            if (oldest := next(waiting, None)) is not None:
                left_ns = oldest.submitted_ns + most_ns - now_ns
                next_at = min(next_at, now + left_ns / NS_PER_SEC)
        return next_at

    # Changes.

    async def run(self) -> None:
        """Make the changes that are decided until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                for change in self.residence.decide():
                    model, waker = self.models[change.resident]
                    if change.verb is Verb.REFUSE:
                        self._refuse(model, waker)
                    elif change.verb is Verb.WAKE and change.resident.is_new:
                        waker.report(None)  # its load has waited for room
                    else:
                        tasks.create_task(self._make(change, model, waker))
                await self._wait_until(min(self._end_late(), self.residence.next_at))

    async def _wait_until(self, at: float) -> None:
        try:
            async with asyncio.timeout_at(None if math.isinf(at) else at):
                await self._changed.wait()
        except TimeoutError:
            """The next decision is due."""

    def _refuse(self, model: Model, waker: Waker) -> None:
        no_room = partial(self.residence.no_room, waker.resident)
        _end_waiting(model, no_room)
        waker.report(no_room())

    async def _make(self, change: Change, model: Model, waker: Waker) -> None:
        """Wake a version, or have it sleep."""
        try:
            with self._measures.change():
                if change.verb is Verb.WAKE:
                    await self._wake(model, waker)
                else:
                    await self._sleep(model, waker, change)
        except InferenceError as error:  # the version is being closed
            log.debug("change ended", extra={"model": model.name, "reason": error.reason})
        finally:
            self._changed.set()
            self._on_change()

    async def _sleep(self, model: Model, waker: Waker, change: Change) -> None:
        resident, naps = waker.resident, False
        if change.verb is Verb.DROP:
            await model.instances.drop()
        elif resident.is_new:
            await model.instances.empty()
        else:
            naps = await model.instances.sleep(naps=resident.rules.sleep is not SleepLevel.UNLOAD)
        self.evictions[change.why] += 1
        extra = {"model": model.name, "version": model.version, "why": change.why}
        log.info("model asleep", extra=extra)
        self.residence.slept(resident, naps=naps)
        if model.requests or waker.end is not None:  # they have been queued meanwhile
            self.residence.wish(resident)

    async def _wake(self, model: Model, waker: Waker) -> None:
        resident = waker.resident
        extra = {"model": model.name, "version": model.version}
        log.info("waking model", extra=extra)
        now, secs = asyncio.get_running_loop().time(), resident.load_secs
        waker.expected_at = now + secs if secs else None
        try:
            began = await self._measures.begin()
            await model.wake()
            for stream in model.requests.values():
                stream.model_at = None
            await self._note_load(model, waker, began)
        except InferenceError as error:
            self._note_failure(model, waker, error)
            return
        finally:
            waker.expected_at = None
        log.info("model awake", extra=extra | {"secs": round(resident.load_secs, 1)})
        self.woken += 1
        self.wake_secs += resident.load_secs
        waker.report(None)
        await self._keep(model, waker)

    async def _note_load(self, model: Model, waker: Waker, began: LoadStart) -> None:
        """Take the time and memory of a load that has ended into account."""
        grown = await self._measures.end(began)
        resident = waker.resident
        resident.load_secs = model.load_secs = asyncio.get_running_loop().time() - began.at
        for place, size in grown.items():
            waker.measured[place] = max(size, waker.measured.get(place, 0))
        gpus, measured = self._budget.gpus, waker.measured
        needs = needs_of(model.config, resident.rules, gpus, waker.size, measured)
        self.residence.woken(resident, needs)

    async def _keep(self, model: Model, waker: Waker) -> None:
        adapters = dict.fromkeys(name for each in model.instances for name in each.adapters)
        measured, secs = dict(waker.measured), model.load_secs
        facts = KeptFacts(waker.load, measured, secs, tuple(adapters), model.max_model_len)
        await self._threads.run(self._facts.write, waker.folder, facts)

    def _note_failure(self, model: Model, waker: Waker, error: InferenceError) -> None:
        self.failed += 1
        log.error("waking failed", extra={"model": model.name, "reason": error.reason})
        self.residence.failed(waker.resident, error.message)

        def failure() -> RetryLater:
            text = f"model '{model.name}' could not be loaded into memory: {error.message}"
            return RetryLater(text, waker.resident.retry_secs)

        _end_waiting(model, failure)
        waker.report(failure())


def _end_waiting(
    model: Model, error: Callable[[], InferenceError], before_ns: float = math.inf
) -> None:
    """End the requests that no instance has, of those submitted before."""
    for record, stream in tuple(model.requests.items()):
        if not record.has_begun and record.submitted_ns <= before_ns:
            stream.abandon(error())
