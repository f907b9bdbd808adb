"""The instances of one loaded version: their slots, serving, restart and in-place update."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.errors import InferenceError, died, no_instance
from gateway.models.instance_groups import (
    InstanceSlot,
    close_instances,
    close_slots,
    closed_on_error,
    unregister_slots,
)
from gateway.models.limits import Limits
from gateway.models.sleep import attempted, closing, drop_naps, empty_slot, load_spares
from gateway.models.warmup import warm_up
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.scheduler import Scheduler

log = logging.getLogger("sluice.model")

FIRST_BACKOFF_SECS = 0.5
LONGEST_BACKOFF_SECS = 30.0
STABLE_SECS = 60.0
"""The restart counter is reset after this time without a crash."""


def backoff_secs(tries: int) -> float:
    """Delay before a restart, by the number of earlier tries (seconds)."""
    return min(LONGEST_BACKOFF_SECS, FIRST_BACKOFF_SECS * 2.0 ** min(tries, 16))


class Instances:
    """Instances in their slots, serving for one scheduler; an instance that dies is replaced.

    `able` is True while an instance is alive that takes requests, `ready` also if all are passive
    and one is alive. While they are `asleep` no instance takes requests, and requests are queued;
    the version is `ready` then. They are loaded again `side_by_side` if their backend allows it.
    `folder` is the model's. One task runs `run`; `close` comes after it.
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
        self._has_begun = asyncio.Event()
        self._on_change: Callable[[], None] = lambda: None
        self._on_unavailable: Callable[[InferenceError], None] = lambda _: None
        self._trouble = ""
        self.able = self.ready = self.asleep = self.side_by_side = False
        self._refresh()

    @property
    def slots(self) -> Sequence[InstanceSlot]:
        """The slots, loaded or not."""
        return tuple(self._slots)

    def __iter__(self) -> Iterator[Instance]:
        """The instances that are alive."""
        return iter([slot.instance for slot in self._slots if slot.instance is not None])

    @property
    def room(self) -> int | None:
        """The requests, or rows of batches, that they execute at once; None for any number."""
        batching, room = self._config.dynamic_batching, 0
        rows = 1 if batching is None else max(1, self._config.max_batch_size)
        for instance in self:
            if instance.places is not None:
                room += instance.places
            elif instance.concurrency is None:
                return None
            else:
                room += instance.concurrency * rows
        return room or None

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
            self._has_begun.set()
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

    def begin_asleep(self) -> None:
        """Serve without instances until `wake`."""
        self.asleep = True
        self._refresh()

    async def sleep(self, *, naps: bool) -> bool:
        """Give no instance more requests, and empty the slots after their last executions.

        Instances that can nap do so, if `naps`; returns whether any does. InferenceError if `run`
        ends meanwhile.
        """
        await self._owned(partial(self._fall_asleep, naps=naps))
        return any(slot.napping is not None for slot in self._slots)

    def empty(self) -> Awaitable[object]:
        """Begin to close the instances of a version that does not serve yet; await the end."""
        self.begin_asleep()
        return close_instances(self._slots)

    async def wake(self) -> None:
        """Fill the slots; InferenceError if that fails: they are asleep then, and none naps."""
        await self._owned(self._wake)

    async def drop(self) -> None:
        """Close the instances that nap."""
        await self._owned(partial(drop_naps, self._slots))

    def close(self) -> Awaitable[object]:
        """Begin to close all instances concurrently; await the end."""
        self._has_begun.set()
        closed = close_slots([*self._slots, *self._retired])
        self._refresh()
        return closed

    def _refresh(self) -> None:
        """Set `able` and `ready`, which each request reads, after a change of the instances."""
        alive = [slot for slot in self._slots if slot.instance is not None]
        self.able = not self.asleep and not all(slot.passive for slot in alive)
        self.ready = self.asleep or self.able or (bool(alive) and self.passive)

    async def _warm_up(self, slot: InstanceSlot, instance: Instance) -> None:
        name, config = slot.placement.name, self._config
        executing = warm_up(instance, name, config, self._folder, self._statistics)
        await slot.closings.run(executing, lambda: [instance], config.name)

    async def _owned(self, change: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run a change of the slots in `run`, which ends it, though this caller is cancelled."""
        await self._has_begun.wait()
        if self._tasks is None:
            raise closing(self._config.name)
        task = self._tasks.create_task(attempted(change(), self._config.name))
        await asyncio.wait([task])
        if task.cancelled():
            raise closing(self._config.name)
        if (error := task.result()) is not None:
            raise error

    async def _fall_asleep(self, *, naps: bool) -> None:
        self.begin_asleep()
        async with asyncio.TaskGroup() as tasks:
            for slot in self._slots:
                tasks.create_task(self._empty(slot, naps=naps))

    def _empty(self, slot: InstanceSlot, *, naps: bool) -> Coroutine[None, None, None]:
        """Give the instance of a slot no more requests, at once; await that the slot is empty."""
        watch = self._watches.pop(slot, None)
        if watch is not None:
            watch.cancel()
        executing = slot.instance is not None and not slot.passive
        withdrawn = self._withdraw(slot.instance) if slot.instance and executing else None
        return self._close_asleep(slot, watch, withdrawn, naps=naps)

    async def _close_asleep(
        self,
        slot: InstanceSlot,
        watch: asyncio.Task[None] | None,
        withdrawn: Coroutine[None, None, None] | None,
        *,
        naps: bool,
    ) -> None:
        if withdrawn is not None:
            await withdrawn
        if watch is not None:
            await asyncio.wait([watch])  # it may be loading another instance
        await empty_slot(slot, naps=naps)

    async def _wake(self) -> None:
        slots = tuple(self._slots)
        spares = await self._load_spares(slots)
        for slot, spare in zip(slots, spares, strict=True):
            slot.instance, slot.tries = spare.instance, 0
        self.asleep = False
        self._refresh()
        for slot in slots:
            self._add(slot)

    async def _load_spares(self, slots: Sequence[InstanceSlot]) -> Sequence[InstanceSlot]:
        """Other instances for the slots, loaded and prepared."""
        spares = await load_spares(slots, side_by_side=self.side_by_side)
        async with closed_on_error(spares):
            await self.prepare(spares)
        return spares

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

    def _withdraw(self, instance: Instance) -> Coroutine[None, None, None]:
        """Give an instance no more requests, at once.

        Await the end of its executions and sequences; its death ends them too.
        """
        return self._unless_dead(instance, self._scheduler.remove(instance))

    async def _unless_dead(self, instance: Instance, ended: Awaitable[object]) -> None:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._remove_dead(instance))
            await ended
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
        (spare,) = await self._load_spares([slot])
        assert spare.instance is not None  # noqa: S101 - it has just been loaded
        return spare.instance

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
