"""A parsed `config.pbtxt`: its types come from here, its text forms from `pbtxt`.

Read in this order: `model` (the whole message), `data_type`, `scheduling`, `optimization` (parts of
it), `schema` (the fields of the dataclasses), `pbtxt` (text to values and back), `platforms` (the
backend of a model).
"""

from gateway.config.data_type import (
    DataType,
)
from gateway.config.model import (
    WRAPPED,
    Agent,
    AllVersions,
    BatchInput,
    BatchInputKind,
    BatchOutput,
    BatchOutputKind,
    HistogramOptions,
    InputFormat,
    InstanceGroup,
    InstanceKind,
    LatestVersions,
    MetricControl,
    MetricIdentifier,
    ModelConfig,
    ModelInput,
    ModelMetrics,
    ModelOperations,
    ModelOutput,
    ModelResponseCache,
    ModelWarmup,
    RateLimiter,
    RepositoryAgents,
    Resource,
    SecondaryDevice,
    SecondaryDeviceKind,
    SpecificVersions,
    TensorReshape,
    TransactionPolicy,
    VersionPolicy,
    WarmupInput,
)
from gateway.config.optimization import (
    OptimizationPolicy,
)
from gateway.config.scheduling import (
    DynamicBatching,
    EnsembleScheduling,
    SequenceBatching,
)

__all__ = [
    "WRAPPED",
    "Agent",
    "AllVersions",
    "BatchInput",
    "BatchInputKind",
    "BatchOutput",
    "BatchOutputKind",
    "DataType",
    "DynamicBatching",
    "EnsembleScheduling",
    "HistogramOptions",
    "InputFormat",
    "InstanceGroup",
    "InstanceKind",
    "LatestVersions",
    "MetricControl",
    "MetricIdentifier",
    "ModelConfig",
    "ModelInput",
    "ModelMetrics",
    "ModelOperations",
    "ModelOutput",
    "ModelResponseCache",
    "ModelWarmup",
    "OptimizationPolicy",
    "RateLimiter",
    "RepositoryAgents",
    "Resource",
    "SecondaryDevice",
    "SecondaryDeviceKind",
    "SequenceBatching",
    "SpecificVersions",
    "TensorReshape",
    "TransactionPolicy",
    "VersionPolicy",
    "WarmupInput",
]
