"""The instances of one loaded version: their slots, serving, restart and in-place update."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.errors import InferenceError, died, no_instance
from gateway.models.closings import Closings
from gateway.models.instance_groups import Placement
from gateway.models.limits import Limits
from gateway.models.warmup import warm_up
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.rate_limiter import ExecutionLimiter, Registration
from gateway.schedulers.scheduler import Scheduler

log = logging.getLogger("sluice.model")

Load = Callable[[], Awaitable[Instance]]

FIRST_BACKOFF_SECS = 0.5
LONGEST_BACKOFF_SECS = 30.0
STABLE_SECS = 60.0
"""The restart counter is reset after this time without a crash."""


def backoff_secs(tries: int) -> float:
    """Delay before a restart, by the number of earlier tries (seconds)."""
    return min(LONGEST_BACKOFF_SECS, FIRST_BACKOFF_SECS * 2.0 ** min(tries, 16))


@dataclass(slots=True, eq=False)
class InstanceSlot:
    """A placement, its instance (None while none is alive), and the function that loads one.

    `registration` is the slot's at the execution limiter, if any; `closings` close its instances.
    `since` is the start of the instance (monotonic seconds); `tries` counts restarts since it was
    stable.
    """

    load: Load
    placement: Placement = field(default_factory=Placement)
    instance: Instance | None = None
    registration: Registration | None = None
    closings: Closings = field(default_factory=Closings)
    tries: int = 0
    since: float = 0.0

    @property
    def passive(self) -> bool:
        """Loaded, but never given a request."""
        return self.placement.group.passive


class Instances:
    """Instances in their slots, serving for one scheduler; an instance that dies is replaced.

    `able` is True while an instance is alive that takes requests, `ready` also if all are passive
    and one is alive. `folder` is the model's. One task runs `run`; `close` comes after it.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: Sequence[InstanceSlot],
        scheduler: Scheduler,
        folder: Path,
        statistics: ModelStatistics,
    ) -> None:
        self._config = config
        self._slots = list(slots)
        self._scheduler = scheduler
        self._folder = folder
        self._statistics = statistics
        self._restart_tries = Limits.read(config).restart_tries
        self._retired: list[InstanceSlot] = []
        self._watches: dict[InstanceSlot, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._on_unavailable: Callable[[InferenceError], None] = lambda _: None
        self._trouble = ""
        self.able = self.ready = False
        self._refresh()

    @property
    def slots(self) -> Sequence[InstanceSlot]:
        """The slots, loaded or not."""
        return tuple(self._slots)

    def __iter__(self) -> Iterator[Instance]:
        """The instances that are alive."""
        return iter([slot.instance for slot in self._slots if slot.instance is not None])

    @property
    def passive(self) -> bool:
        """Whether no instance ever takes requests."""
        return all(slot.passive for slot in self._slots)

    @property
    def trouble(self) -> str:
        """The reason why no instance takes requests."""
        if self._slots and self.passive:
            return "all of its instances are passive"
        return self._trouble or "its instances are closed"

    async def prepare(self, slots: Sequence[InstanceSlot]) -> None:
        """Warm up each instance and prepare the scheduler for it; InferenceError if that fails."""
        self._refresh()
        preparation = self._scheduler.preparation
        for slot in slots:
            if slot.instance is not None and not slot.passive:
                await self._warm_up(slot, slot.instance)
                if preparation is not None:
                    await preparation.prepare(slot.instance)

    async def run(
        self, on_change: Callable[[], None], on_unavailable: Callable[[InferenceError], None]
    ) -> None:
        """Run the scheduler, and restart instances that die, until cancelled.

        `on_change` is called whenever `able` may have changed, `on_unavailable` once no restart is
        left for the last instance.
        """
        self._on_change, self._on_unavailable = on_change, on_unavailable
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                tasks.create_task(self._scheduler.run())
                for slot in self._slots:
                    self._add(slot)
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    def exchange(self, config: ModelConfig, slots: Sequence[InstanceSlot]) -> None:
        """Serve with these slots: newly prepared ones, and present ones.

        One synchronous step; the other instances complete their executions.
        """
        before, self._slots, self._config = self._slots, list(slots), config
        self._refresh()
        for slot in slots:
            if slot not in before:
                self._add(slot)
        for slot in before:
            if slot not in slots:
                self._retire(slot)

    def name(self, instance: Instance) -> str:
        """The name of an instance; empty if it is in no slot."""
        found = (slot.placement.name for slot in self._slots if slot.instance is instance)
        return next(found, "")

    def restart(self, instance: Instance, reason: str) -> None:
        """Kill a stalled instance and load it again; its requests fail with UNAVAILABLE.

        No effect if it is in no slot, or `run` is ending.
        """
        slot = next((each for each in self._slots if each.instance is instance), None)
        watch = None if slot is None else self._watches.get(slot)
        if slot is None or watch is None or self._tasks is None:
            return
        extra = {"model": self._config.name, "instance": slot.placement.name, "reason": reason}
        log.error("instance stalled", extra=extra)
        watch.cancel()
        closed = self._drop(slot, instance, reason)
        instance.kill(reason)
        self._watches[slot] = self._tasks.create_task(self._reload(slot, closed, reason))
        self._statistics.stalls += 1

    def close(self) -> Awaitable[object]:
        """Begin to close all instances concurrently; await the end."""
        closed = close_slots([*self._slots, *self._retired])
        self._refresh()
        return closed

    def _refresh(self) -> None:
        """Set `able` and `ready`, which each request reads, after a change of the instances."""
        alive = [slot for slot in self._slots if slot.instance is not None]
        self.able = not all(slot.passive for slot in alive)
        self.ready = self.able or (bool(alive) and self.passive)

    async def _warm_up(self, slot: InstanceSlot, instance: Instance) -> None:
        name, config = slot.placement.name, self._config
        executing = warm_up(instance, name, config, self._folder, self._statistics)
        await slot.closings.run(executing, lambda: [instance], config.name)

    def _add(self, slot: InstanceSlot) -> None:
        if slot.instance is None or self._tasks is None:
            return
        slot.since = time.monotonic()
        if not slot.passive:
            self._scheduler.add(slot.instance, slot.registration)
        self._watches[slot] = self._tasks.create_task(self._watch(slot, slot.instance))

    def _retire(self, slot: InstanceSlot) -> None:
        if (watch := self._watches.pop(slot, None)) is not None:
            watch.cancel()
        if slot.instance is None:
            unregister_slots([slot])
            return
        self._retired.append(slot)
        if self._tasks is not None:
            self._tasks.create_task(self._close_retired(slot, slot.instance))

    async def _close_retired(self, slot: InstanceSlot, instance: Instance) -> None:
        """Close a retired instance after its work; if cancelled, `close` does."""
        if not slot.passive:
            await self._withdraw(instance)
        self._retired.remove(slot)
        await close_slots([slot])

    async def _withdraw(self, instance: Instance) -> None:
        """Wait for the end of its executions and sequences; its death ends them too."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._remove_dead(instance))
            await self._scheduler.remove(instance)
            watching.cancel()

    async def _remove_dead(self, instance: Instance) -> None:
        reason = await self._died(instance)
        self._scheduler.remove(instance, self._failed(reason, instance))

    async def _watch(self, slot: InstanceSlot, instance: Instance) -> None:
        while True:
            reason = await self._died(instance)
            closed = self._drop(slot, instance, reason)
            instance = await self._load_another(slot, closed, reason)

    async def _died(self, instance: Instance) -> str:
        death: asyncio.Future[str] = instance.death or asyncio.get_running_loop().create_future()
        reason = await asyncio.shield(death)
        log.error("instance died", extra={"model": self._config.name, "reason": reason})
        return reason

    async def _reload(self, slot: InstanceSlot, closed: Awaitable[None], reason: str) -> None:
        await self._watch(slot, await self._load_another(slot, closed, reason))

    async def _load_another(
        self, slot: InstanceSlot, closed: Awaitable[None], reason: str
    ) -> Instance:
        await closed
        while (replacement := await self._replace(slot, slot.tries, reason)) is None:
            slot.tries += 1
        slot.tries += 1
        slot.instance, slot.since = replacement, time.monotonic()
        self._refresh()
        if not slot.passive:
            self._scheduler.add(replacement, slot.registration)
        self._on_change()
        return replacement

    def _drop(self, slot: InstanceSlot, instance: Instance, reason: str) -> Awaitable[None]:
        """Begin to close an instance that has died or stalled; await the result."""
        slot.instance = None
        self._refresh()
        if time.monotonic() - slot.since > STABLE_SECS:
            slot.tries = 0
        if not slot.passive:
            self._scheduler.remove(instance, self._failed(reason, instance))
        self._trouble = f"{reason}; it is being restarted"
        self._on_change()
        return slot.closings.close(instance, slot.placement.name)

    async def _replace(self, slot: InstanceSlot, tries: int, reason: str) -> Instance | None:
        limit, model = self._restart_tries, self._config.name
        if tries >= limit:
            self._give_up(f"{reason}; given up after {limit} restarts")
            await asyncio.Event().wait()
        self._trouble = f"{reason}; restart {tries + 1} of {limit} is under way, retry shortly"
        await asyncio.sleep(backoff_secs(tries))
        try:
            instance = await self._load_again(slot)
        except InferenceError as error:
            log.error("restart failed", extra={"model": model, "reason": error.reason})
            return None
        except Exception:
            # Around one model load: a runtime's own exception must not end the server.
            log.exception("restart failed unexpectedly", extra={"model": model})
            return None
        log.info("instance restarted", extra={"model": model, "restart": tries + 1})
        return instance

    async def _load_again(self, slot: InstanceSlot) -> Instance:
        """Another instance for the slot, loaded and prepared."""
        spare = InstanceSlot(slot.load, slot.placement, await slot.load(), closings=slot.closings)
        instance = spare.instance
        assert instance is not None  # noqa: S101 - it has just been loaded
        try:
            await self.prepare([spare])
        except BaseException:
            await close_slots([spare])
            raise
        return instance

    def _give_up(self, trouble: str) -> None:
        """Stop the restarts of an instance; without any other, queued requests fail."""
        log.error("model given up", extra={"model": self._config.name, "reason": trouble})
        self._trouble = trouble
        if not self.able:
            self._on_unavailable(no_instance(self._text(trouble)))

    def _failed(self, reason: str, instance: Instance) -> InferenceError:
        return died(self._text(reason), instance.number)

    def _text(self, reason: str) -> str:
        return f"model '{self._config.name}' failed: {reason}"


def register_slots(slots: Sequence[InstanceSlot], limiter: ExecutionLimiter | None) -> None:
    """Register each active slot at the execution limiter; all or none.

    Raises INVALID_ARG for a slot that could never execute.
    """
    if limiter is None:
        return
    try:
        for slot in slots:
            if not slot.passive:
                slot.registration = limiter.register(slot.placement.group, slot.placement.device)
    except BaseException:
        unregister_slots(slots)
        raise


def unregister_slots(slots: Iterable[InstanceSlot]) -> None:
    """Unregister slots that no longer execute."""
    for slot in slots:
        registration, slot.registration = slot.registration, None
        if registration is not None:
            registration.unregister()


async def load_slots(slots: Sequence[InstanceSlot], *, side_by_side: bool) -> None:
    """Load the instances; after an error none stays loaded, and the error is raised."""
    try:
        if side_by_side:
            await _load_together(slots)
        else:
            for slot in slots:
                slot.instance = await slot.load()
    except BaseException:
        await close_slots(slots)
        raise


def close_slots(slots: Sequence[InstanceSlot]) -> Awaitable[object]:
    """Begin to close the instances concurrently, and unregister the slots; await the end.

    If the wait is cancelled, they still close.
    """
    unregister_slots(slots)
    ends: list[asyncio.Future[None]] = []
    for slot in slots:
        instance, slot.instance = slot.instance, None
        if instance is not None:
            ends.append(slot.closings.close(instance, slot.placement.name))
    return asyncio.gather(*ends)


async def _load_together(slots: Sequence[InstanceSlot]) -> None:
    async def load_one(slot: InstanceSlot) -> None:
        slot.instance = await slot.load()

    try:
        async with asyncio.TaskGroup() as tasks:
            for slot in slots:
                tasks.create_task(load_one(slot))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def match_slots(
    wanted: Sequence[InstanceSlot], present: Sequence[InstanceSlot]
) -> list[InstanceSlot | None]:
    """For each wanted slot a present slot of an equal placement, or None."""
    left = list(present)
    found: list[InstanceSlot | None] = []
    for slot in wanted:
        suits = (each for each in left if each.placement.signature == slot.placement.signature)
        found.append(next(suits, None))
        left = [each for each in left if each is not found[-1]]
    return found
