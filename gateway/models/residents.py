"""The models of a server that share its memory: one task has them wake and sleep."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial

from gateway.errors import Code, InferenceError, RetryLater
from gateway.memory_settings import ModelMemory
from gateway.models.kept_facts import FactsFolder, KeptFacts, VersionFiles
from gateway.models.limits import ResidenceRules, Residency, SleepLevel
from gateway.models.memory import LoadMeasures, LoadStart, budget_of, file_bytes, needs_of
from gateway.models.model import Model
from gateway.models.residence import HOST, Change, Residence, Resident, Stage, Verb
from gateway.models.version_usage import VersionUsage
from gateway.models.waker import ReadFiles, Waker, end_waiting
from gateway.threads import Threads

log = logging.getLogger("sluice.residence")

NS_PER_SEC = 1_000_000_000


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

    async def admit(
        self, model: Model, files: VersionFiles, replaced: Collection[Model] = ()
    ) -> bool:
        """Read the rules of a version that is about to be loaded; whether it may sleep.

        Unless it may, it takes its memory from now on. `replaced` are the versions that end once it
        serves. Raises INVALID_ARG if the rules are wrong, or if it is larger than the budget.
        """
        rules = ResidenceRules.read(model.config, on_demand=self._budget.on_demand)
        sleeps = rules.residency is not Residency.ALWAYS
        if not (sleeps or self.residence.budget):
            return False
        read = await self._threads.run(self._read, files)
        measured = {} if read.facts is None else read.facts.memory
        needs = needs_of(model.config, rules, self._budget.gpus, read.size, measured)
        before = [resident for resident, (each, _) in self.models.items() if each in replaced]
        if refusal := self.residence.refusal_of_size(model.name, needs, before):
            raise InferenceError(Code.INVALID_ARG, refusal)
        usage = VersionUsage(model)
        resident = Resident(model.name, rules, needs, usage, is_new=True)
        if rules.sleep is SleepLevel.LEVEL_1:
            resident.rests = {HOST: read.size}
        model.waking = waker = Waker(self.residence, self.wish, resident, read)
        if read.facts is not None and sleeps:
            resident.load_secs = model.load_secs = read.facts.load_secs
            model.describe(read.facts.adapters, read.facts.max_model_len)
        if not sleeps:
            self._add(model, waker, awake=True)
        return sleeps

    def _read(self, files: VersionFiles) -> ReadFiles:
        folder, load = files.folder, files.identify().hex()
        return ReadFiles(folder, load, self._facts.read(folder, load), file_bytes(folder))

    def begin(self, model: Model) -> None:
        """Take a version into account that serves from now on."""
        if model.members:
            usage = self._ensembles[model] = VersionUsage(model)
            model.requests.on_idle = partial(self._ensemble_used, model)
            for by in self._users_of(model):
                by.append(usage)
        waker = model.waking
        if isinstance(waker, Waker):
            waker.resident.is_new = False
            if waker.resident not in self.models:
                self._add(model, waker, awake=False)
            if waker.resident.rules.residency is not Residency.ALWAYS:
                model.requests.on_idle = partial(self._used, waker)
            self._changed.set()

    @asynccontextmanager
    async def room(self, model: Model, place: asyncio.Semaphore) -> AsyncIterator[None]:
        """Room for the instances of an admitted version, then a place among the loads.

        For one that may sleep, room is made as for a wake; call `filled` inside the block. Call
        `begin` or `end` after it. Raises RetryLater if there is no room in time. The exit never
        waits.
        """
        waker = model.waking
        assert isinstance(waker, Waker)  # noqa: S101 - it has been admitted
        try:
            if waker.resident not in self.models:
                self._add(model, waker, awake=False)
                await self._awaken(waker)
            async with place:
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

    def retire(self, model: Model) -> None:
        """Note that a version ends with its last request."""
        if isinstance(waker := model.waking, Waker):
            waker.resident.is_retired = True

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
            end_waiting(model, waker.late, now_ns - most_ns)
            waiting = (each for each in model.requests if not each.started_ns)
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
        end_waiting(model, no_room)
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
        except Exception:
            # Around one change: it must not end those of other models.
            log.exception("change failed", extra={"model": model.name})
            self._settle(model, waker)
        finally:
            self._changed.set()
            self._on_change()

    def _settle(self, model: Model, waker: Waker) -> None:
        """Take a version as its instances are, after a change with an unforeseen end."""
        if model.instances.asleep:
            text = "an unforeseen error; the server's log has it"
            self._note_failure(model, waker, InferenceError(Code.INTERNAL, text))
        else:
            self.residence.woken(waker.resident, waker.resident.needs)
            waker.report(None)

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
        needs = needs_of(model.config, resident.rules, gpus, waker.files.size, measured)
        self.residence.woken(resident, needs)

    async def _keep(self, model: Model, waker: Waker) -> None:
        adapters = dict.fromkeys(name for each in model.instances for name in each.adapters)
        measured, secs = dict(waker.measured), model.load_secs
        facts = KeptFacts(waker.files.load, measured, secs, tuple(adapters), model.max_model_len)
        await self._threads.run(self._facts.write, waker.files.folder, facts)

    def _note_failure(self, model: Model, waker: Waker, error: InferenceError) -> None:
        self.failed += 1
        log.error("waking failed", extra={"model": model.name, "reason": error.reason})
        self.residence.failed(waker.resident, error.message)

        def failure() -> RetryLater:
            text = f"model '{model.name}' could not be loaded into memory: {error.message}"
            return RetryLater(text, waker.resident.retry_secs)

        end_waiting(model, failure)
        waker.report(failure())
