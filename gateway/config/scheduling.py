"""The scheduling choice of a configuration.

The dataclasses mirror the messages of `ModelConfig.scheduling_choice`: see `model.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.config.data_type import DataType


class TimeoutAction(StrEnum):
    """The treatment of a request that waited too long."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Limits of one queue; zero means no timeout, and no limit."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBatching:
    """Requests wait a short time to execute together."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)


class ControlKind(StrEnum):
    """Signals of a control input about a request's place in its sequence."""

    CONTROL_SEQUENCE_START = "CONTROL_SEQUENCE_START"
    CONTROL_SEQUENCE_READY = "CONTROL_SEQUENCE_READY"
    CONTROL_SEQUENCE_END = "CONTROL_SEQUENCE_END"
    CONTROL_SEQUENCE_CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One signal and its encoding: two values, for false and true, or the type of the id."""

    kind: ControlKind = ControlKind.CONTROL_SEQUENCE_START
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType = DataType.TYPE_INVALID


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlInput:
    """An input of the model that carries signals."""

    name: str = ""
    control: tuple[Control, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialState:
    """The state before the first request; one of `zero_data` and `data_file`."""

    data_type: DataType = DataType.TYPE_INVALID
    dims: tuple[int, ...] = ()
    zero_data: bool | None = None
    data_file: str | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A tensor passed from each request of a sequence to the next."""

    input_name: str = ""
    output_name: str = ""
    data_type: DataType = DataType.TYPE_INVALID
    dims: tuple[int, ...] = ()
    initial_state: tuple[InitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyDirect:
    """A sequence keeps its batch slot until it ends."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOldest:
    """Sequences share an instance; batches form from the oldest requests."""

    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatching:
    """The requests of one correlation id go to one instance, in order."""

    direct: StrategyDirect | None = None
    oldest: StrategyOldest | None = None
    max_sequence_idle_microseconds: int = 0
    control_input: tuple[ControlInput, ...] = ()
    state: tuple[State, ...] = ()
    iterative_sequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One call of a member; the maps go from its tensors to tensors of the ensemble."""

    model_name: str = ""
    model_version: int = 0
    input_map: Mapping[str, str] = field(default_factory=dict)
    output_map: Mapping[str, str] = field(default_factory=dict)
    model_namespace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleScheduling:
    """The steps of an ensemble."""

    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: int = 0
