"""The optimization policy of a configuration.

The dataclasses mirror the messages below `ModelOptimizationPolicy`: see `model.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class OptimizationPriority(StrEnum):
    """Urgency against other models on the device."""

    PRIORITY_DEFAULT = "PRIORITY_DEFAULT"
    PRIORITY_MAX = "PRIORITY_MAX"
    PRIORITY_MIN = "PRIORITY_MIN"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptimization:
    """The optimization level of the model's graph; its meaning is the backend's."""

    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """Dimensions of one input, without the batch dimension."""

    dim: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLowerBound:
    """The smallest request that a CUDA graph may serve."""

    batch_size: int = 0
    input: Mapping[str, GraphShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """One CUDA graph to capture at load."""

    batch_size: int = 0
    input: Mapping[str, GraphShape] = field(default_factory=dict)
    graph_lower_bound: GraphLowerBound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """CUDA graphs, events and streams."""

    graphs: bool = False
    busy_wait_events: bool = False
    graph_spec: tuple[GraphSpec, ...] = ()
    output_copy_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator and its settings."""

    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionAccelerators:
    """Accelerators to try, in order of preference."""

    gpu_execution_accelerator: tuple[Accelerator, ...] = ()
    cpu_execution_accelerator: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedMemoryBuffer:
    """Whether transfers go through pinned memory."""

    enable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationPolicy:
    """All hints of one model."""

    graph: GraphOptimization | None = None
    priority: OptimizationPriority = OptimizationPriority.PRIORITY_DEFAULT
    cuda: CudaOptions | None = None
    execution_accelerators: ExecutionAccelerators | None = None
    input_pinned_memory: PinnedMemoryBuffer | None = None
    output_pinned_memory: PinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: int = 0
    eager_batching: bool = False
