"""ModelConfig, the configuration of a model, and its parts.

The dataclasses here, in `scheduling.py` and in `optimization.py` mirror the messages of
`proto/model_config.proto`, which explains each field: the same names in the same order, except that
a name Python reserves ends in an underscore. A sub-message or a member of a oneof that is not given
is None; everything else has the default of its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.config.data_type import DataType
from gateway.config.optimization import OptimizationPolicy
from gateway.config.scheduling import DynamicBatching, EnsembleScheduling, SequenceBatching
from gateway.tensor import Datatype

WRAPPED = "wrapped"
"""Metadata of a mapping whose values the message wraps: the name of the field that holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A parsed `config.pbtxt`. It is immutable; use `dataclasses.replace`."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: VersionPolicy | None = None
    max_batch_size: int = 0
    input: tuple[ModelInput, ...] = ()
    output: tuple[ModelOutput, ...] = ()
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    optimization: OptimizationPolicy | None = None
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: EnsembleScheduling | None = None
    instance_group: tuple[InstanceGroup, ...] = ()
    default_model_filename: str = ""
    cc_model_filenames: Mapping[str, str] = field(default_factory=dict)
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict, metadata={WRAPPED: "string_value"})
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_operations: ModelOperations | None = None
    model_transaction_policy: TransactionPolicy | None = None
    model_repository_agents: RepositoryAgents | None = None
    response_cache: ModelResponseCache | None = None
    model_metrics: ModelMetrics | None = None

    @property
    def decoupled(self) -> bool:
        """A request may have any number of responses."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled

    @property
    def batching(self) -> bool:
        """Tensors have a leading batch dimension, which `dims` leaves out."""
        return self.max_batch_size > 0

    def wire_shape(self, tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
        """The shape that clients see; -1 is any size."""
        return (-1, *tensor.dims) if self.batching else tensor.dims

    def parameter(self, key: str, default: str = "") -> str:
        """The parameter of that key, or the default."""
        return self.parameters.get(key, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReshape:
    """The shape that the backend sees where it differs from `dims`."""

    shape: tuple[int, ...] = ()


class InputFormat(StrEnum):
    """Layout of an image."""

    FORMAT_NONE = "FORMAT_NONE"
    FORMAT_NHWC = "FORMAT_NHWC"
    FORMAT_NCHW = "FORMAT_NCHW"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One input of the model; `dims` leaves the batch dimension out, and -1 is any size."""

    name: str = ""
    data_type: DataType = DataType.TYPE_INVALID
    format: InputFormat = InputFormat.FORMAT_NONE
    dims: tuple[int, ...] = ()
    reshape: TensorReshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False

    @property
    def datatype(self) -> Datatype:
        """The datatype on the wire; InferenceError if the config names none."""
        return self.data_type.datatype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """One output of the model; `dims` as for an input."""

    name: str = ""
    data_type: DataType = DataType.TYPE_INVALID
    dims: tuple[int, ...] = ()
    reshape: TensorReshape | None = None
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False

    @property
    def datatype(self) -> Datatype:
        """The datatype on the wire; InferenceError if the config names none."""
        return self.data_type.datatype


class BatchInputKind(StrEnum):
    """Values that can be derived from a batch."""

    BATCH_ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    BATCH_ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    BATCH_ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    BATCH_ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """An input that the server derives from the batch."""

    kind: BatchInputKind = BatchInputKind.BATCH_ELEMENT_COUNT
    target_name: tuple[str, ...] = ()
    data_type: DataType = DataType.TYPE_INVALID
    source_input: tuple[str, ...] = ()


class BatchOutputKind(StrEnum):
    """Ways to split an output over the requests of a batch."""

    BATCH_SCATTER_WITH_INPUT_SHAPE = "BATCH_SCATTER_WITH_INPUT_SHAPE"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutput:
    """An output that the server must split over the requests of a batch."""

    target_name: tuple[str, ...] = ()
    kind: BatchOutputKind = BatchOutputKind.BATCH_SCATTER_WITH_INPUT_SHAPE
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestVersions:
    """The highest numbers."""

    num_versions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllVersions:
    """Every version there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecificVersions:
    """The versions named here."""

    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicy:
    """The versions in the repository that are served; at most one of the three is given."""

    latest: LatestVersions | None = None
    all: AllVersions | None = None
    specific: SpecificVersions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """An amount of one named resource."""

    name: str = ""
    global_: bool = False
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimiter:
    """Resources that an instance needs to execute, and its weight."""

    resources: tuple[Resource, ...] = ()
    priority: int = 0


class SecondaryDeviceKind(StrEnum):
    """Kinds of accelerators next to the main device."""

    KIND_NVDLA = "KIND_NVDLA"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryDevice:
    """An accelerator next to the main device."""

    kind: SecondaryDeviceKind = SecondaryDeviceKind.KIND_NVDLA
    device_id: int = 0


class InstanceKind(StrEnum):
    """Kinds of devices; AUTO is resolved when a config is normalised, MODEL by the backend."""

    KIND_AUTO = "KIND_AUTO"
    KIND_GPU = "KIND_GPU"
    KIND_CPU = "KIND_CPU"
    KIND_MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """A number of equal instances per device, and the devices they run on."""

    name: str = ""
    kind: InstanceKind = InstanceKind.KIND_AUTO
    count: int = 0
    rate_limiter: RateLimiter | None = None
    gpus: tuple[int, ...] = ()
    secondary_devices: tuple[SecondaryDevice, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupInput:
    """The source of one input's data; one of the last three is given."""

    data_type: DataType = DataType.TYPE_INVALID
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWarmup:
    """Requests to execute before the model is ready."""

    name: str = ""
    batch_size: int = 0
    inputs: Mapping[str, WarmupInput] = field(default_factory=dict)
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOperations:
    """Custom operations of the backend."""

    op_library_filename: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionPolicy:
    """The number of responses of a request: decoupled is any number, else exactly one."""

    decoupled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One repository agent and its settings."""

    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryAgents:
    """Agents that act on the model's files before it loads."""

    agents: tuple[Agent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponseCache:
    """Whether responses are cached."""

    enable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricIdentifier:
    """The name of a metric."""

    family: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramOptions:
    """Upper bounds of a histogram's buckets, ascending."""

    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricControl:
    """The override for one metric."""

    metric_identifier: MetricIdentifier | None = None
    histogram_options: HistogramOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """Overrides for the metrics of this model."""

    metric_control: tuple[MetricControl, ...] = ()
