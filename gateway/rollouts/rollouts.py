"""All rollouts of a server: their beginnings at loads, their time, and requests of persons."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakSet

from gateway.conversations.conversations import Conversations
from gateway.errors import Code, InferenceError, exiting
from gateway.models.labels import set_labels
from gateway.models.model import Model
from gateway.models.model_folder import PLAN_FILE, by_version
from gateway.models.registry import KnownModel
from gateway.models.repository import LoadSource, ModelEntry, ModelId
from gateway.models.repository_control import RepositoryControl
from gateway.models.version_gate import VersionGate
from gateway.policy.areas import Area
from gateway.policy.audit import AuditedChange, AuditLog
from gateway.rollouts.changes import ChangeableRollouts, RolloutAction, RolloutBeginning
from gateway.rollouts.events import RolloutEvents
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.golden_watch import watch_golden
from gateway.rollouts.model_rollouts import ModelRollouts, PlanFile
from gateway.rollouts.plan import PlanStart, RolloutPlan, changed_plan, read_plan
from gateway.rollouts.rollout import RUNNING, Rollout, RolloutState, Transition
from gateway.rollouts.saving import RolloutSaver
from gateway.rollouts.state import RolloutRecord, StateDirectory
from gateway.threads import Threads

TICK_SECS = 1.0
FILE_THREADS = 4
"""Threads that read plans and states of folders: a disk that hangs holds no others."""

log = logging.getLogger("sluice.rollouts")

DECISIONS = frozenset(RolloutState) - {RolloutState.WAITING, *RUNNING}
"""The states that are counted."""


class RolloutController(Protocol):
    """The controller of a fleet, which decides on rollouts of models that replicas host."""

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """The state of the latest rollout of each model that has had one, as members of JSON."""

    def state(self, name: str) -> Mapping[str, Any] | None:
        """The state of a model that replicas host; None for another one."""

    def history(self, name: str) -> Sequence[Transition]:
        """The transitions of a model's rollouts, oldest first."""

    async def change(
        self, name: str, action: RolloutAction, members: Mapping[str, Any], by: str
    ) -> None:
        """Change a rollout there; raises InferenceError."""


class Rollouts(VersionGate, ChangeableRollouts):
    """The rollouts of all models; one task runs `run`.

    `clock` is monotonic. Operations raise InferenceError: NOT_FOUND for an unknown model,
    INVALID_ARG for an operation that does not fit the state, UNAVAILABLE without a usable state
    directory.
    """

    def __init__(
        self,
        control: RepositoryControl,
        conversations: Conversations,
        state: StateDirectory,
        threads: Threads,
        audit: AuditLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._conversations = conversations
        self._state = state
        self._threads = threads
        self._audit = audit
        self._clock = clock
        self._models: dict[ModelId, ModelRollouts] = {}
        self._watched: WeakSet[Evidence] = WeakSet()
        self.events = RolloutEvents(control.registry, self.describe_all)
        self.decisions = Counter[tuple[str, str]]()
        """The transitions of each model into a state of DECISIONS."""
        self.controller: RolloutController | None = None
        self._is_draining = False
        self._wake = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._saver = RolloutSaver(self._models, state)
        self._files = Threads("rollouts", FILE_THREADS)

    # VersionGate.

    async def admit(self, known: KnownModel, source: LoadSource, *, again: bool) -> LoadSource:
        """See `VersionGate`."""
        of_model = await self._of(known)
        if again:
            of_model.record.unloadable.clear()
        return of_model.admit(source, await self._plan_file(of_model, source.entry))

    def loaded(self, known: KnownModel) -> None:
        """See `VersionGate`."""
        if (of_model := self._models.get(known.id)) is not None:
            of_model.loaded()
            self._wake_if_dirty(of_model)

    def failed(self, known: KnownModel, error: InferenceError) -> bool:
        """See `VersionGate`."""
        of_model = self._models.get(known.id)
        return of_model is not None and not self._is_draining and of_model.failed(error)

    def unloaded(self, known: KnownModel) -> None:
        """See `VersionGate`."""
        if (of_model := self._models.get(known.id)) is not None:
            of_model.unloaded()

    # Operations.

    async def start(
        self,
        name: str,
        version: int,
        by: str,
        *,
        members: Mapping[str, Any] | None = None,
        reason: str = "",
        again: bool = False,
    ) -> None:
        """Begin a rollout of a version, or one that waits; both versions are loaded on return.

        `members` replace those of the plan. A version that was rolled back needs `again` until its
        files change.
        """
        of_model = self._changeable(name)
        rollout = of_model.open
        if rollout is not None:
            self._start_waiting(of_model, rollout, version, by, reason)
            return
        known = of_model.known
        wanted = RolloutBeginning(version=version, again=again, reason=reason)
        source = of_model.source
        found = await self._plan_file(of_model, source.entry)
        if refusal := found.refusal or of_model.unreadable:
            raise InferenceError(Code.UNAVAILABLE, refusal)
        await self._saver.require()
        own = {**(members or {}), "start": PlanStart.AUTOMATIC}
        plan = changed_plan(found.plan or RolloutPlan(), own, "request")
        of_model.require_startable(wanted)
        snapshot = source.snapshot
        if not source.overridden:
            snapshot = await self._files.run(self._control.snapshot, known.id)
        found_on_disk = sorted(each for each in by_version(snapshot) if each is not None)
        replace(source.entry, available=tuple(found_on_disk)).require([version])
        starting = of_model.starting(wanted, by, plan, snapshot, overridden=source.overridden)
        load = self._control.adjust if source.overridden else self._control.refresh
        await load(known.id, starting)
        begun = of_model.record.rollout
        if begun is None or begun.candidate != version or begun.state is RolloutState.ABORTED:
            text = f"the rollout of version {version} of model '{name}' ended during its load"
            raise InferenceError(Code.UNAVAILABLE, f"{text}; its history has the reason")

    def set_labels(self, name: str, changes: Mapping[str, int | None]) -> None:
        """Name loaded versions of a model; None removes a label. The state directory keeps them."""
        known = self._control.registry.only(name)
        set_labels(known, changes)
        of_model = self._models.get(known.id)
        if of_model is not None and self._state.has_place:
            of_model.keep_labels(changes)
            self._saver.wake()
        self._control.registry.notify()

    def describe(self, name: str) -> dict[str, Any]:
        """The state of a model's latest rollout, as members of JSON."""
        found = None if self.controller is None else self.controller.state(name)
        return self._find(name).describe() if found is None else dict(found)

    def describe_all(self) -> list[dict[str, Any]]:
        """The state of the latest rollout of each model that has had one, by name."""
        found = {str(each.known.id): each.describe() for each in self.models()}
        elsewhere = {} if self.controller is None else self.controller.states()
        return [dict(each) for _, each in sorted({**elsewhere, **found}.items())]

    def models(self) -> list[ModelRollouts]:
        """The models that have had a rollout, by name."""
        found = (self._models[model] for model in sorted(self._models))
        return [each for each in found if each.record.rollout is not None]

    def history(self, name: str) -> list[Transition]:
        """The transitions of a model's rollouts, oldest first."""
        if self.controller is not None and self.controller.state(name) is not None:
            return list(self.controller.history(name))
        return self._find(name).history

    def drain(self) -> None:
        """End the streams of events, and refuse changes.

        No more requests are observed: those that the exit ends are no candidate's fault.
        """
        self._is_draining = True
        self.events.close()
        for of_model in self._models.values():
            of_model.end_observation()

    # Time.

    async def run(self) -> None:
        """Pass time, and write the state, until cancelled; then write it once more."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self.events.follow())
                self._tasks.create_task(self._saver.run())
                while True:
                    await self._next()
                    self.tick()
        finally:
            self._tasks = None
            self._files.close()
            await self._saver.close()

    def tick(self) -> None:
        """Judge and advance all rollouts."""
        now = self._clock()
        for of_model in tuple(self._models.values()):
            of_model.tick(now)
            self._watch_golden(of_model)
        self.events.measure(now)

    def _watch_golden(self, of_model: ModelRollouts) -> None:
        """Begin to watch the guardrail `golden` of new evidence."""
        evidence = of_model.evidence
        if evidence is None or evidence in self._watched or self._tasks is None:
            return
        self._watched.add(evidence)
        if evidence.guardrails.golden_secs is not None:
            find = self._control.registry.find
            self._tasks.create_task(watch_golden(of_model, evidence, self._threads, find))

    async def _next(self) -> None:
        """Wait for a transition, for a change of readiness, or for the next second of a rollout."""
        running = any(each.open is not None for each in self._models.values())
        if not running:
            await self._wake.wait()
        else:
            waits = [
                asyncio.create_task(self._wake.wait()),
                asyncio.create_task(self._control.registry.changed()),
            ]
            try:
                await asyncio.wait(waits, timeout=TICK_SECS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
        self._wake.clear()

    # Models.

    async def _of(self, known: KnownModel) -> ModelRollouts:
        """The rollouts of a model; its record is read at the first load that can read it."""
        found = self._models.get(known.id)
        if found is not None and not found.unreadable:
            found.known = known
            return found
        name = str(known.id)
        read = await self._saver.read(name)
        parts = self._conversations, self._threads, self._noted, self._over
        made = ModelRollouts(known, read.record or RolloutRecord(model=name), *parts)
        made.damaged, made.unreadable = read.damaged, read.unreadable
        self._models[known.id] = made
        return made

    async def _plan_file(self, of_model: ModelRollouts, entry: ModelEntry) -> PlanFile:
        """The plan in a model's folder; with one the state directory is taken."""
        try:
            text = await self._files.run(entry.text, PLAN_FILE)
            if not text:
                return PlanFile()
            plan = read_plan(text)
            if of_model.unreadable:
                return PlanFile(plan, of_model.unreadable)
            if not self._state.has_place:
                return PlanFile(plan, "this server keeps no state of rollouts")
            await self._saver.require()
        except InferenceError as error:
            if self._is_draining:
                raise
            log.error("rollouts refused", extra={"model": entry.name, "reason": error.message})
            return PlanFile(RolloutPlan(), error.message)
        return PlanFile(plan)

    # Parts.

    def _find(self, name: str) -> ModelRollouts:
        found = [each for model, each in self._models.items() if model.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise _invalid(f"{len(found)} models have the name '{name}'")
        if any(known.of_fleet for known in self._control.registry.named(name)):
            raise _invalid(f"model '{name}': its replicas decide on rollouts, each on its own")
        raise InferenceError(Code.NOT_FOUND, f"model '{name}' is not loaded")

    def _changeable(self, name: str) -> ModelRollouts:
        if self._is_draining:
            raise exiting()
        return self._find(name)

    def _change(self, name: str, change: Callable[[Rollout], None]) -> None:
        of_model = self._changeable(name)
        rollout = of_model.record.rollout
        if rollout is None:
            raise _invalid(f"model '{name}' has no rollout")
        of_model.require_loaded(rollout)
        change(rollout)
        of_model.changed()
        self._wake_both()

    def _start_waiting(
        self, of_model: ModelRollouts, rollout: Rollout, version: int, by: str, reason: str
    ) -> None:
        if rollout.state is not RolloutState.WAITING or rollout.candidate != version:
            of_model.require_none_open()
        of_model.require_loaded(rollout)
        rollout.start(by, reason)
        of_model.changed()
        self._wake_both()

    def _wake_if_dirty(self, of_model: ModelRollouts) -> None:
        if of_model.dirty or of_model.open is not None:
            self._wake_both()

    def _wake_both(self) -> None:
        self._wake.set()
        self._saver.wake()

    def _noted(self, of_model: ModelRollouts, change: Transition) -> None:
        """Publish a transition: log, audit log and listeners."""
        name, rollout = str(of_model.known.id), of_model.record.rollout
        about = {"model": name, "step": change.step + 1, "weight": f"{change.weight:g}"}
        if rollout is not None:
            about |= {"from": rollout.stable, "to": rollout.candidate}
        about |= {"reason": change.reason}
        log.info("rollout changed", extra={**about, "state": change.state, "by": change.by})
        if self._audit is not None:
            action = f"rollout-{change.state}"
            self._audit.add(
                AuditedChange(area=Area.MODEL_REPOSITORY, action=action, by=change.by, about=about)
            )
        if change.state in DECISIONS:
            self.decisions[name, change.state] += 1
        self.events.transition(name, rollout, change)
        self._control.registry.notify()  # replicas announce weights and labels
        self._wake_both()

    def _over(self, of_model: ModelRollouts, model: Model) -> None:
        if self._tasks is not None:
            self._tasks.create_task(self._drain(of_model, model))

    async def _drain(self, of_model: ModelRollouts, model: Model) -> None:
        """Unload a version that gets no new requests, once it has no sequences."""
        sequences = model.scheduler.sequences
        if sequences is not None:
            await sequences.ended()
        if model not in of_model.draining:
            return  # the model was unloaded meanwhile
        of_model.draining.discard(model)
        of_model.hold(of_model.record.stable)
        try:
            await self._control.adjust(of_model.known.id)
        except InferenceError as error:
            about = {"model": str(of_model.known.id), "reason": error.message}
            log.error("version not unloaded", extra=about)


def _invalid(text: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, text)
