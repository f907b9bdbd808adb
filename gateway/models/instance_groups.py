"""Instance groups of a model: the GPUs that they may use, the places and slots of instances."""

import asyncio
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from gateway.backend import Backend, Instance
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.cuda_driver import CudaFailed, load_driver, memory_in_use
from gateway.errors import Code, InferenceError
from gateway.memory_settings import GpuSettings
from gateway.models.closings import Closings
from gateway.schedulers.rate_limiter import ExecutionLimiter, Registration


def every_backend(backend: str) -> bool:
    """The default of `serve`: each backend's runtime computes on GPUs."""
    return True


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """The GPUs of this machine that models may use.

    `usable` are the numbers of those with a compute capability of at least `minimum`. `serve`
    returns whether a backend's installed runtime computes on GPUs. It is called only if there is a
    GPU, and may import for seconds.
    """

    usable: tuple[int, ...] = ()
    minimum: tuple[int, int] = GpuSettings().min_compute_capability
    serve: Callable[[str], bool] = field(default=every_backend, compare=False)


NO_GPUS = UsableGpus()
Policies = Mapping[str, frozenset[int]]
"""The CPU cores of each host policy, by its name."""
EVERY_CORE: frozenset[int] = frozenset()


def check_memory(model: str, gpu: int, limits: Mapping[int, float]) -> None:
    """Raise UNAVAILABLE if more than the GPU's limit of its memory is in use; blocks.

    `limits` are fractions by GPU; a GPU without one is not checked (models:
    `--model-load-gpu-limit`).
    """
    if gpu not in limits:
        return
    try:
        used = memory_in_use(load_driver(), gpu)
    except CudaFailed as error:
        raise InferenceError(
            Code.UNAVAILABLE,
            f"can not create model '{model}': the memory of GPU {gpu}, which has a limit, cannot "
            f"be read ({error})",
        ) from None
    if used > limits[gpu]:
        raise InferenceError(
            Code.UNAVAILABLE,
            f"can not create model '{model}': memory limit set for GPU {gpu} has exceeded, model "
            f"loading is rejected. ({used:.0%} is in use, the limit is {limits[gpu]:.0%})",
        )


log = logging.getLogger("sluice.gpus")

CPU_COUNTS = {"onnxruntime": 2, "tensorflow": 2}
"""Default count of a group on the CPU; 1 for every other backend."""

SPREAD_THEMSELVES = {"vllm", "tensorrtllm"}
"""Backends whose engines choose their GPUs: a group without kind and GPUs is one engine."""

MOST_INSTANCES = 1024
"""Limit of one group on one device; a typing error must not take all memory."""


def fill_instance_groups(config: ModelConfig, gpus: UsableGpus) -> tuple[InstanceGroup, ...]:
    """At least one group, each with a name, a kind other than AUTO, a count and GPUs."""
    if not config.instance_group:
        return (_filled(InstanceGroup(name=config.name), config.backend, gpus),)
    return tuple(
        _filled(replace(each, name=each.name or f"{config.name}_{index}"), config.backend, gpus)
        for index, each in enumerate(config.instance_group)
    )


def _filled(group: InstanceGroup, backend: str, gpus: UsableGpus) -> InstanceGroup:
    kind = _resolved(group, backend, gpus)
    default_count = CPU_COUNTS.get(backend, 1) if kind is InstanceKind.KIND_CPU else 1
    default_gpus = gpus.usable if kind is InstanceKind.KIND_GPU else ()
    return replace(
        group,
        kind=kind,
        count=group.count if group.count >= 1 else default_count,
        gpus=group.gpus or default_gpus,
    )


def _resolved(group: InstanceGroup, backend: str, gpus: UsableGpus) -> InstanceKind:
    if group.kind is not InstanceKind.KIND_AUTO:
        return group.kind
    if backend in SPREAD_THEMSELVES and not group.gpus:
        return InstanceKind.KIND_MODEL
    if not gpus.usable or any(gpu not in gpus.usable for gpu in group.gpus):
        return InstanceKind.KIND_CPU
    if group.gpus or gpus.serve(backend):
        return InstanceKind.KIND_GPU
    log.warning(
        "GPU not used: this build of the runtime cannot compute on it",
        extra={"instance_group": group.name, "backend": backend},
    )
    return InstanceKind.KIND_CPU


def check_instance_groups(config: ModelConfig, gpus: UsableGpus) -> None:
    """Raise INVALID_ARG for the first group that this machine cannot have."""
    for group in config.instance_group:
        problem = _gpu_problem(group, gpus) or _profile_problem(config, group)
        if problem := problem or _count_problem(group):
            raise InferenceError(
                Code.INVALID_ARG, f"instance group {group.name} of model {config.name} {problem}"
            )


def _gpu_problem(group: InstanceGroup, gpus: UsableGpus) -> str:
    if group.kind is not InstanceKind.KIND_GPU:
        return f"has kind {group.kind} but specifies one or more GPUs" if group.gpus else ""
    if not group.gpus:
        return "has kind KIND_GPU but no GPUs are available"
    major, minor = gpus.minimum
    for gpu in group.gpus:
        if gpu not in gpus.usable:
            return (
                f"specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum "
                f"required CUDA compute compatibility of {major + minor / 10:f} are: "
                f"{','.join(map(str, gpus.usable))}"
            )
    return ""


def _count_problem(group: InstanceGroup) -> str:
    if group.count <= MOST_INSTANCES:
        return ""
    return f"has a count of {group.count}, expected at most {MOST_INSTANCES}"


def _profile_problem(config: ModelConfig, group: InstanceGroup) -> str:
    if not group.profile or config.backend == "tensorrt":
        return ""
    platform = f" {config.platform}" if config.platform else ""
    return (
        f"and platform{platform} specifies profile field which is only supported for TensorRT "
        "models"
    )


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


def placements(config: ModelConfig) -> Iterator[Placement]:
    """One placement per instance, group and GPU; instances on two GPUs share names."""
    for group in config.instance_group or (InstanceGroup(name=config.name),):
        for device in group.gpus or (0,):
            for number in range(max(1, group.count)):
                yield Placement(name=f"{group.name}_{number}", group=group, device=device)


def cores_of(
    placement: Placement, config: ModelConfig, backend: Backend, policies: Policies
) -> frozenset[int]:
    """The CPU cores of an instance; empty for all of them.

    Raises UNSUPPORTED if its policy names cores and its backend cannot pin instances.
    """
    name = placement.group.host_policy or _default_policy(placement)
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


def _default_policy(placement: Placement) -> str:
    """The name of the policy of a group that names none, as on Triton."""
    if placement.group.kind is InstanceKind.KIND_GPU:
        return f"gpu_{placement.device}"
    return "model" if placement.group.kind is InstanceKind.KIND_MODEL else "cpu"


Load = Callable[[], Awaitable[Instance]]


@dataclass(slots=True, eq=False)
class InstanceSlot:
    """A placement, its instance (None while none is alive), and the function that loads one.

    A `napping` instance has freed memory, and executes nothing; see `Sleeper`. `check_woken` raises
    for one that has woken and answers a golden request wrongly. `registration` is
    the slot's at the execution limiter, if any; `closings` close its instances. `since` is the
    start of the instance (monotonic seconds); `tries` counts restarts since it was stable.
    """

    load: Load
    placement: Placement = field(default_factory=Placement)
    instance: Instance | None = None
    napping: Instance | None = None
    check_woken: Callable[[Instance], Awaitable[None]] | None = None
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
    async with closed_on_error(slots):
        if side_by_side:
            await _load_together(slots)
        else:
            for slot in slots:
                slot.instance = await slot.load()


@asynccontextmanager
async def closed_on_error(slots: Sequence[InstanceSlot]) -> AsyncIterator[None]:
    """Close the slots if the block fails or is cancelled."""
    try:
        yield
    except BaseException:
        await close_slots(slots)
        raise


def close_slots(slots: Sequence[InstanceSlot]) -> Awaitable[object]:
    """Begin to close the instances concurrently, and unregister the slots; await the end.

    If the wait is cancelled, they still close.
    """
    unregister_slots(slots)
    return close_instances(slots)


def close_instances(slots: Sequence[InstanceSlot]) -> Awaitable[object]:
    """As `close_slots`, for slots that are to be filled again."""
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


@dataclass(frozen=True, slots=True)
class InPlaceUpdate:
    """Other instances for a loaded version (in-place update).

    `exchange` is that of the version. `kept` are the present slots that suit `wanted`. Requests see
    no change before `commit`; an update that is not committed needs `close`.
    """

    exchange: Callable[[ModelConfig, Sequence[InstanceSlot]], None]
    config: ModelConfig
    wanted: Sequence[InstanceSlot]
    kept: Sequence[InstanceSlot | None]

    @property
    def added(self) -> list[InstanceSlot]:
        """The slots that had to be loaded."""
        return [slot for slot, old in zip(self.wanted, self.kept, strict=True) if old is None]

    def commit(self) -> None:
        """Serve with the wanted slots; other instances finish their executions and close."""
        for slot, old in zip(self.wanted, self.kept, strict=True):
            if old is not None:
                old.placement, old.load = slot.placement, slot.load
        slots = [old or slot for slot, old in zip(self.wanted, self.kept, strict=True)]
        self.exchange(self.config, slots)

    def close(self) -> Awaitable[object]:
        """Begin to close the loaded instances; await the end."""
        return close_slots(self.added)
