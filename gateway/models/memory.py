"""Memory of models: declared, measured, or estimated from their files."""

import asyncio
import importlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gateway.config import InstanceKind, ModelConfig
from gateway.memory_settings import ModelMemory
from gateway.models.limits import ResidenceRules, SleepLevel
from gateway.models.model_folder import take_snapshot
from gateway.models.residence import HOST, MODELS, Memory
from gateway.threads import Threads

log = logging.getLogger("sluice.residence")

KIB = 1024
PARENT_FIELD = 1
"""The number of the parent among the fields behind the name in /proc/PID/stat."""


ESTIMATE = 1.2
"""Memory of a model that was never measured, as a multiple of the size of its files."""


def gpu_place(number: int) -> str:
    """The place of a GPU's memory."""
    return f"gpu {number}"


def budget_of(settings: ModelMemory) -> Memory:
    """The budget by place."""
    found = {gpu_place(number): size for number, size in settings.gpus.items()}
    if settings.host is not None:
        found[HOST] = settings.host
    if settings.models:
        found[MODELS] = settings.models
    return found


def needs_of(
    config: ModelConfig,
    rules: ResidenceRules,
    gpus: Collection[int],
    size: int,
    measured: Memory,
) -> Memory:
    """The memory of a version that is awake, whose files have that size.

    `gpus` are those with a budget. A place that was not measured has its estimate. Weights that
    stay on the host for a nap take memory always.
    """
    counts = _counts(config, gpus)
    if rules.memory is not None:
        needs = dict.fromkeys(counts, rules.memory)
    else:
        estimates = {place: int(ESTIMATE * size * count) for place, count in counts.items()}
        needs = {**estimates, **measured}
    if rules.sleep is SleepLevel.LEVEL_1:
        needs[HOST] = needs.get(HOST, 0) + size
    return needs | {MODELS: 1}


def _counts(config: ModelConfig, gpus: Collection[int]) -> Counter[str]:
    """The number of instances at each place; an engine that chooses its GPUs is on all of them."""
    found: Counter[str] = Counter()
    for group in config.instance_group:
        numbers: Sequence[int] = ()
        if group.kind is InstanceKind.KIND_GPU:
            numbers = group.gpus or (0,)
        elif group.kind is InstanceKind.KIND_MODEL:
            numbers = tuple(gpus)
        for place in map(gpu_place, numbers):
            found[place] += max(1, group.count)
        if not numbers:
            found[HOST] += max(1, group.count)
    return found or Counter({HOST: 1})


def file_bytes(folder: Path) -> int:
    """The size of the files of a version; blocks."""
    return sum(size for _, size in take_snapshot(folder).values() if size > 0)


def memory_in_use(own: int, gpus: Collection[int], proc: Path = Path("/proc")) -> Memory:
    """The memory of a process with its descendants, and of all processes on those GPUs.

    A place that cannot be read is absent. Blocks.
    """
    found = {gpu_place(number): used for number, used in _gpu_bytes(gpus)}
    if host := sum(_proportional_bytes(proc / str(pid)) for pid in (own, *_below(own, proc))):
        found[HOST] = host
    return found


@dataclass(frozen=True, slots=True)
class LoadStart:
    """The begin of a load: its time, its number, the memory, and whether nothing else changed."""

    at: float
    number: int
    memory: Memory
    is_alone: bool


class LoadMeasures:
    """Measures the memory of loads, as far as no other change of memory is under way meanwhile.

    Memory is read in `threads`, on this host and on those GPUs. The log names each GPU once whose
    memory cannot be read.
    """

    def __init__(self, threads: Threads, gpus: Collection[int]) -> None:
        self._read = partial(threads.run, memory_in_use, os.getpid(), gpus)
        self._under_way = self._begun = 0
        self._believed = set(gpus)

    @contextmanager
    def change(self) -> Iterator[None]:
        """A change of memory, for the time of the block."""
        self._under_way += 1
        self._begun += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def begin(self) -> LoadStart:
        """The begin of a load; it is a `change`."""
        at, number = asyncio.get_running_loop().time(), self._begun
        is_alone = self._under_way == 1
        found = await self._read()
        for gpu in [each for each in self._believed if gpu_place(each) not in found]:
            self._believed.remove(gpu)
            log.warning("memory of a GPU with a budget not read", extra={"gpu": gpu})
        return LoadStart(at, number, found, is_alone)

    async def end(self, began: LoadStart) -> Memory:
        """The memory that a load has taken; empty if it is not known."""
        after = await self._read()
        if not began.is_alone or began.number != self._begun:
            return {}
        before = began.memory
        return {place: after[place] - before[place] for place in before.keys() & after.keys()}


def _below(own: int, proc: Path) -> Iterator[int]:
    """The descendants of a process."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in proc.glob("[0-9]*/stat"):
        try:
            behind = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        children[int(behind[PARENT_FIELD])].append(int(stat.parent.name))
    pending = [own]
    while pending:
        found = children[pending.pop()]
        pending += found
        yield from found


def _proportional_bytes(process: Path) -> int:
    """The memory of a process, with its share of pages that others map too; 0 if it has ended."""
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * KIB


def _gpu_bytes(gpus: Collection[int]) -> Iterator[tuple[int, int]]:
    """The memory in use on GPUs; none without Python's `pynvml` or a driver."""
    if not gpus:
        return
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return
    try:
        nvml.nvmlInit()
        for number in gpus:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            yield number, nvml.nvmlDeviceGetMemoryInfo(handle).used
    except nvml.NVMLError:
        return
