"""The slots of a version's instances: their loads, registrations and closings."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.backend import Instance
from gateway.models.closings import Closings
from gateway.models.instance_groups import Placement
from gateway.schedulers.rate_limiter import ExecutionLimiter, Registration

Load = Callable[[], Awaitable[Instance]]


@dataclass(slots=True, eq=False)
class InstanceSlot:
    """A placement, its instance (None while none is alive), and the function that loads one.

    A `napping` instance has freed memory, and executes nothing; see `Sleeper`. `registration` is
    the slot's at the execution limiter, if any; `closings` close its instances. `since` is the
    start of the instance (monotonic seconds); `tries` counts restarts since it was stable.
    """

    load: Load
    placement: Placement = field(default_factory=Placement)
    instance: Instance | None = None
    napping: Instance | None = None
    registration: Registration | None = None
    closings: Closings = field(default_factory=Closings)
    tries: int = 0
    since: float = 0.0

    @property
    def passive(self) -> bool:
        """Loaded, but never given a request."""
        return self.placement.group.passive


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
        found = [each for each in (slot.instance, slot.napping) if each is not None]
        ends += [slot.closings.close(each, slot.placement.name) for each in found]
        slot.instance = slot.napping = None
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
