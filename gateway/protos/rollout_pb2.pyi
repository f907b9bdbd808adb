from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRolloutsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRolloutsResponse(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...

class GetRolloutRequest(_message.Message):
    __slots__ = ("model_name", "history")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    history: bool
    def __init__(self, model_name: _Optional[str] = ..., history: _Optional[bool] = ...) -> None: ...

class GetRolloutResponse(_message.Message):
    __slots__ = ("rollout", "history")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    rollout: Rollout
    history: _containers.RepeatedCompositeFieldContainer[RolloutTransition]
    def __init__(self, rollout: _Optional[_Union[Rollout, _Mapping]] = ..., history: _Optional[_Iterable[_Union[RolloutTransition, _Mapping]]] = ...) -> None: ...

class ChangeRolloutRequest(_message.Message):
    __slots__ = ("model_name", "action", "members")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    action: str
    members: _struct_pb2.Struct
    def __init__(self, model_name: _Optional[str] = ..., action: _Optional[str] = ..., members: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ChangeRolloutResponse(_message.Message):
    __slots__ = ("rollout",)
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    rollout: Rollout
    def __init__(self, rollout: _Optional[_Union[Rollout, _Mapping]] = ...) -> None: ...

class WatchRolloutsRequest(_message.Message):
    __slots__ = ("last_event_id",)
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    last_event_id: str
    def __init__(self, last_event_id: _Optional[str] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("model", "stable", "candidate", "state", "reason", "weight", "shadow", "step", "steps", "spent_secs", "for_secs", "requests", "min_requests", "suspicious", "guardrails")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SPENT_SECS_FIELD_NUMBER: _ClassVar[int]
    FOR_SECS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SUSPICIOUS_FIELD_NUMBER: _ClassVar[int]
    GUARDRAILS_FIELD_NUMBER: _ClassVar[int]
    model: str
    stable: int
    candidate: int
    state: str
    reason: str
    weight: float
    shadow: float
    step: int
    steps: _containers.RepeatedCompositeFieldContainer[RolloutStep]
    spent_secs: float
    for_secs: float
    requests: int
    min_requests: int
    suspicious: _containers.RepeatedScalarFieldContainer[str]
    guardrails: _containers.RepeatedCompositeFieldContainer[RolloutGuardrail]
    def __init__(self, model: _Optional[str] = ..., stable: _Optional[int] = ..., candidate: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., weight: _Optional[float] = ..., shadow: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[RolloutStep, _Mapping]]] = ..., spent_secs: _Optional[float] = ..., for_secs: _Optional[float] = ..., requests: _Optional[int] = ..., min_requests: _Optional[int] = ..., suspicious: _Optional[_Iterable[str]] = ..., guardrails: _Optional[_Iterable[_Union[RolloutGuardrail, _Mapping]]] = ...) -> None: ...

class RolloutStep(_message.Message):
    __slots__ = ("weight", "shadow", "min_requests", "pause")
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    FOR_FIELD_NUMBER: _ClassVar[int]
    MIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    weight: float
    shadow: float
    min_requests: int
    pause: bool
    def __init__(self, weight: _Optional[float] = ..., shadow: _Optional[float] = ..., min_requests: _Optional[int] = ..., pause: _Optional[bool] = ..., **kwargs) -> None: ...

class RolloutGuardrail(_message.Message):
    __slots__ = ("guardrail", "evidence", "limit", "p", "candidate", "stable", "shown_ratio", "breached", "max", "proof")
    GUARDRAIL_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    P_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    SHOWN_RATIO_FIELD_NUMBER: _ClassVar[int]
    BREACHED_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    guardrail: str
    evidence: float
    limit: float
    p: float
    candidate: RolloutCounts
    stable: RolloutCounts
    shown_ratio: float
    breached: bool
    max: float
    proof: RolloutProof
    def __init__(self, guardrail: _Optional[str] = ..., evidence: _Optional[float] = ..., limit: _Optional[float] = ..., p: _Optional[float] = ..., candidate: _Optional[_Union[RolloutCounts, _Mapping]] = ..., stable: _Optional[_Union[RolloutCounts, _Mapping]] = ..., shown_ratio: _Optional[float] = ..., breached: _Optional[bool] = ..., max: _Optional[float] = ..., proof: _Optional[_Union[RolloutProof, _Mapping]] = ...) -> None: ...

class RolloutCounts(_message.Message):
    __slots__ = ("requests", "events", "rate", "low", "high")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    requests: float
    events: float
    rate: float
    low: float
    high: float
    def __init__(self, requests: _Optional[float] = ..., events: _Optional[float] = ..., rate: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class RolloutProof(_message.Message):
    __slots__ = ("ratio", "evidence", "limit")
    RATIO_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ratio: float
    evidence: float
    limit: float
    def __init__(self, ratio: _Optional[float] = ..., evidence: _Optional[float] = ..., limit: _Optional[float] = ...) -> None: ...

class RolloutTransition(_message.Message):
    __slots__ = ("model", "state", "step", "weight", "by", "reason", "time", "stable", "candidate")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: str
    step: int
    weight: float
    by: str
    reason: str
    time: str
    stable: int
    candidate: int
    def __init__(self, model: _Optional[str] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., weight: _Optional[float] = ..., by: _Optional[str] = ..., reason: _Optional[str] = ..., time: _Optional[str] = ..., stable: _Optional[int] = ..., candidate: _Optional[int] = ...) -> None: ...

class RolloutVersion(_message.Message):
    __slots__ = ("model", "version", "state", "reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    state: str
    reason: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RolloutReset(_message.Message):
    __slots__ = ("rollouts", "versions")
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    versions: _containers.RepeatedCompositeFieldContainer[RolloutVersion]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[RolloutVersion, _Mapping]]] = ...) -> None: ...

class RolloutEvent(_message.Message):
    __slots__ = ("id", "kind", "reset", "transition", "rollout", "version")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    TRANSITION_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    reset: RolloutReset
    transition: RolloutTransition
    rollout: Rollout
    version: RolloutVersion
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., reset: _Optional[_Union[RolloutReset, _Mapping]] = ..., transition: _Optional[_Union[RolloutTransition, _Mapping]] = ..., rollout: _Optional[_Union[Rollout, _Mapping]] = ..., version: _Optional[_Union[RolloutVersion, _Mapping]] = ...) -> None: ...
