"""Slots of a model's instances: placement, loading and closing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.backend import Backend, Instance
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.closings import Closings
from gateway.schedulers.rate_limiter import ExecutionLimiter, Registration

log = logging.getLogger("sluice.loads")

Load = Callable[[], Awaitable[Instance]]
Policies = Mapping[str, frozenset[int]]
"""The CPU cores of each host policy, by its name."""
EVERY_CORE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The name and place of an instance; `device` is the number of its GPU, 0 on others."""

    name: str = ""
    group: InstanceGroup = field(default_factory=InstanceGroup)
    device: int = 0

    @property
    def signature(self) -> tuple[InstanceGroup, int]:
        """Instances of equal signatures can be exchanged (in-place update)."""
        return replace(self.group, name="", count=0, gpus=()), self.device


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


def placements(config: ModelConfig) -> Iterator[Placement]:
    """One placement per instance, group and GPU; instances on two GPUs share names."""
    for group in config.instance_group or (InstanceGroup(name=config.name),):
        for device in group.gpus or (0,):
            for number in range(max(1, group.count)):
                yield Placement(name=f"{group.name}_{number}", group=group, device=device)


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


def cores_of(
    placement: Placement, config: ModelConfig, backend: Backend, policies: Policies
) -> frozenset[int]:
    """The CPU cores of an instance; empty for all of them.

    Raises UNSUPPORTED if its policy names cores and its backend cannot pin instances.
    """
    name = placement.group.host_policy or _default(placement)
    cores = policies.get(name, EVERY_CORE)
    if placement.group.host_policy and not cores:
        extra = {"model": config.name, "host_policy": name}
        log.warning("host policy without settings", extra=extra)
    if cores and not backend.keeps_to_cores:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"instance group '{placement.group.name}' of model '{config.name}' has host policy "
            f"'{name}', but instances of its backend '{config.backend or config.platform}' cannot "
            "keep to CPU cores: give the group another host_policy",
        )
    return cores


def _default(placement: Placement) -> str:
    """The name of the policy of a group that names none, as on Triton."""
    if placement.group.kind is InstanceKind.KIND_GPU:
        return f"gpu_{placement.device}"
    return "model" if placement.group.kind is InstanceKind.KIND_MODEL else "cpu"
