"""The places that a model's instance groups make, and the instances that fill them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.backend import Instance
from gateway.config import InstanceGroup, ModelConfig
from gateway.models.closings import Closings
from gateway.schedulers.rate_limiter import ExecutionLimiter, Registration

Load = Callable[[], Awaitable[Instance]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an instance belongs; `device` is the number of its GPU, 0 on others."""

    name: str = ""
    group: InstanceGroup = field(default_factory=InstanceGroup)
    device: int = 0

    @property
    def signature(self) -> tuple[InstanceGroup, int]:
        """Places of equal signatures may swap their instances (in-place update)."""
        return replace(self.group, name="", count=0, gpus=()), self.device


@dataclass(slots=True, eq=False)
class Slot:
    """One place, the instance in it (None while there is none alive), and how to load one.

    `share` is the place's in the rate limiter, if there is one; `closings` close its instances.
    `since` is when its instance was employed, `tries` counts restarts since one was stable.
    """

    load: Load
    place: Place = field(default_factory=Place)
    instance: Instance | None = None
    share: Registration | None = None
    closings: Closings = field(default_factory=Closings)
    tries: int = 0
    since: float = 0.0

    @property
    def passive(self) -> bool:
        """Loaded, but never given a request."""
        return self.place.group.passive


def places(config: ModelConfig) -> Iterator[Place]:
    """A place for each instance of each group, on each of its GPUs; two GPUs share names."""
    for group in config.instance_group or (InstanceGroup(name=config.name),):
        for device in group.gpus or (0,):
            for number in range(max(1, group.count)):
                yield Place(name=f"{group.name}_{number}", group=group, device=device)


def enrol(slots: Sequence[Slot], limiter: ExecutionLimiter | None) -> None:
    """Give each slot that executes its share; if one cannot have it, none has.

    Raises INVALID_ARG for what could never execute.
    """
    if limiter is None:
        return
    try:
        for slot in slots:
            if not slot.passive:
                slot.share = limiter.register(slot.place.group, slot.place.device)
    except BaseException:
        release_shares(slots)
        raise


def release_shares(slots: Iterable[Slot]) -> None:
    """Nothing will execute in these slots any more."""
    for slot in slots:
        share, slot.share = slot.share, None
        if share is not None:
            share.unregister()


async def fill(slots: Sequence[Slot], *, side_by_side: bool) -> None:
    """Load the instances; if one cannot be loaded, none stays loaded, and its error is raised."""
    try:
        if side_by_side:
            await _fill_together(slots)
        else:
            for slot in slots:
                slot.instance = await slot.load()
    except BaseException:
        await empty(slots)
        raise


def empty(slots: Sequence[Slot]) -> Awaitable[object]:
    """Begin to close the instances, side by side, and give their shares back; await the end.

    If the wait is cancelled, they still close.
    """
    release_shares(slots)
    ends: list[asyncio.Future[None]] = []
    for slot in slots:
        instance, slot.instance = slot.instance, None
        if instance is not None:
            ends.append(slot.closings.close(instance, slot.place.name))
    return asyncio.gather(*ends)


async def _fill_together(slots: Sequence[Slot]) -> None:
    async def fill_one(slot: Slot) -> None:
        slot.instance = await slot.load()

    try:
        async with asyncio.TaskGroup() as tasks:
            for slot in slots:
                tasks.create_task(fill_one(slot))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def match(wanted: Sequence[Slot], present: Sequence[Slot]) -> list[Slot | None]:
    """For each slot that is wanted the present one that suits its place, if there is one left."""
    left = list(present)
    found: list[Slot | None] = []
    for slot in wanted:
        suits = (each for each in left if each.place.signature == slot.place.signature)
        found.append(next(suits, None))
        left = [each for each in left if each is not found[-1]]
    return found
