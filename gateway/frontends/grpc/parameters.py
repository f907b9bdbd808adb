"""Parameters of a ModelInferRequest: scheduling, and custom ones (protocol 18.4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.admission.deadlines import TEXT_TIMES, Wishes, read_wishes
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.status import Metadata
from gateway.messages import Deadline, InferRequest, Parameter, SequenceTag
from gateway.models.model import VersionChooser
from gateway.policy.caller import Caller, tenant_of
from gateway.policy.forwarding import ForwardedNames, is_reserved
from gateway.policy.restrictions import GRPC_PREFIX, NO_RESTRICTIONS, Restrictions
from gateway.protos import grpc_service_pb2 as pb

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
CANCEL = "cancel"
"""True in a message of ModelStreamInfer that only cancels another request."""

RESERVED_PREFIX = "triton_"
MAX_CORRELATION_ID = 128

OF_HTTP = ("headers", "binary_data_output")
"""Names reserved for HTTP: metadata with these names are never forwarded."""


@dataclass(slots=True)
class InferParameters:
    """The parameters of one request; `custom` are passed to the model."""

    custom: dict[str, Parameter] = field(default_factory=dict)
    sequence_tags: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0

    def sequence(self, caller: Caller | None) -> SequenceTag | None:
        """The sequence tag of a request of that caller, if it is in a sequence."""
        tags = self.sequence_tags
        correlation_id = tags.get("sequence_id", 0)
        if not correlation_id:
            return None
        return SequenceTag(
            correlation_id,
            tags.get("sequence_start", False),
            tags.get("sequence_end", False),
            tenant_of(caller),
        )


class HasMetadata(Protocol):
    """An RPC, or the decoder of its requests."""

    @property
    def metadata(self) -> Metadata:
        """The metadata of the client."""


def keyed(request: InferRequest, chooser: VersionChooser, rpc: HasMetadata) -> InferRequest:
    """The request with the metadata that a rollout uses as key; their names are in lower case."""
    if not chooser.has_keys:
        return request
    texts = {name: value for name, value in rpc.metadata if isinstance(value, str)}
    return chooser.keyed(request, lambda name: texts.get(name.lower()))


def wishes_of(
    metadata: Metadata, rpc: Deadline | None = None, *, streams: bool = False
) -> Wishes | None:
    """The times in the metadata of an RPC, with the RPC's own deadline; None without any."""
    if TEXT_TIMES.isdisjoint([name for name, _ in metadata]):
        return None
    headers = [
        (name.encode(), value.encode("latin-1", "replace"))
        for name, value in metadata
        if isinstance(value, str)
    ]
    return read_wishes(headers, 0 if rpc is None else rpc.whole_ns, streams=streams)


class HeaderForwarding:
    """Selects the metadata of an RPC that become parameters; the pattern "" forwards none."""

    def __init__(self, pattern: str, restrictions: Restrictions = NO_RESTRICTIONS) -> None:
        restricted = (GRPC_PREFIX + each.name for each in restrictions.values())
        self._names = ForwardedNames(pattern, restricted)
        self.enabled = self._names.on

    def select(self, metadata: Metadata) -> Mapping[str, str]:
        """The metadata to forward; INVALID_ARG for a name that Triton reserves.

        Other reserved names are dropped.
        """
        found = {name: value for name, value in metadata if self._names.include(name)}
        for name in found:
            _refuse_reserved(name)
        return {name: _text(value) for name, value in found.items() if not is_reserved(name)}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _refuse_reserved(header: str) -> None:
    if header in _KNOWN or header in OF_HTTP or header.startswith(RESERVED_PREFIX):
        raise InferenceError(
            Code.INVALID_ARG,
            f"Header '{header}' is reserved for Triton usage and cannot be forwarded.",
        )


def read_parameters(found: Mapping[str, pb.InferParameter]) -> InferParameters:
    """The parameters of a ModelInferRequest; InferenceError with Triton's texts."""
    parameters = InferParameters()
    for key, value in found.items():
        reader = _KNOWN.get(key)
        if reader is not None:
            reader(parameters, key, value)
        elif key.startswith(RESERVED_PREFIX):
            raise InferenceError(
                Code.INVALID_ARG,
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
                f"following keys starting with 'triton_' are allowed: {EMPTY_FINAL}",
            )
        else:
            parameters.custom[key] = _custom(key, value)
    return parameters


def wants_empty_final(message: pb.ModelInferRequest) -> bool:
    """Whether the client asks for an empty final response (decoupled models)."""
    return (
        message.parameters[EMPTY_FINAL].bool_param if EMPTY_FINAL in message.parameters else False
    )


def wants_cancel(message: pb.ModelInferRequest) -> bool:
    """Whether a message only cancels the requests of its id."""
    return CANCEL in message.parameters and message.parameters[CANCEL].bool_param


def set_parameter(target: pb.InferParameter, value: Parameter) -> None:
    """Write a parameter of a response into a message."""
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value


def _custom(key: str, value: pb.InferParameter) -> Parameter:
    kind = value.WhichOneof("parameter_choice")
    if kind in (None, "uint64_param"):
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or "
            "string_param.",
        )
    found: Parameter = getattr(value, kind)
    return found


def _of_kind(key: str, value: pb.InferParameter, *kinds: str) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid value type for '{key}' parameter, expected {' or '.join(kinds)}.",
        )
    return getattr(value, kind)


def _read_flag(parameters: InferParameters, key: str, value: pb.InferParameter) -> None:
    parameters.sequence_tags[key] = _of_kind(key, value, "bool_param")


def _read_empty_final(parameters: InferParameters, key: str, value: pb.InferParameter) -> None:
    _of_kind(key, value, "bool_param")


def _read_correlation_id(parameters: InferParameters, key: str, value: pb.InferParameter) -> None:
    found = _of_kind(key, value, "int64_param", "string_param")
    if isinstance(found, str) and len(found) > MAX_CORRELATION_ID:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"string correlation ID cannot be longer than {MAX_CORRELATION_ID} characters",
        )
    parameters.sequence_tags[key] = found


def _read_priority(parameters: InferParameters, key: str, value: pb.InferParameter) -> None:
    found = _of_kind(key, value, "int64_param", "uint64_param")
    if found < 0:
        raise InferenceError(Code.INVALID_ARG, "invalid value for 'priority', expected value >= 0.")
    parameters.priority = found


def _read_timeout(parameters: InferParameters, key: str, value: pb.InferParameter) -> None:
    parameters.timeout_us = _of_kind(key, value, "int64_param")


_KNOWN = {
    "sequence_id": _read_correlation_id,
    "sequence_start": _read_flag,
    "sequence_end": _read_flag,
    "priority": _read_priority,
    "timeout": _read_timeout,
    EMPTY_FINAL: _read_empty_final,
}
