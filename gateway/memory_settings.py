"""Settings of memory: GPUs, and the budgets of models in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """The least compute capability of used GPUs, and limits of their memory.

    The default capability is that of Triton's builds. A load is refused if a larger fraction of a
    GPU's memory than its limit is in use.
    """

    min_compute_capability: tuple[int, int] = (6, 0)
    memory_limits: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The budgets of models in memory.

    `host` and `gpus` (by number) are bytes of models; None and an absent GPU have no limit. At most
    `models` are in memory at once, 0 for any number. `on_demand`: models whose config has no
    `residency` are loaded for their first request.
    """

    on_demand: bool = False
    host: int | None = None
    gpus: Mapping[int, int] = field(default_factory=dict)
    models: int = 0
