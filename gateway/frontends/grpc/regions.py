"""Where does a tensor of a message lie in shared memory? (protocol: shared memory, 12.3)"""

from collections.abc import Mapping
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import SharedRegion
from gateway.protos import grpc_service_pb2 as pb

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"


def read_region(tensor: str, parameters: Mapping[str, pb.InferParameter]) -> SharedRegion | None:
    """The region that a tensor's parameters name, or None; InferenceError with Triton's texts."""
    if REGION not in parameters:
        for key in (OFFSET, BYTE_SIZE):
            if key in parameters:
                raise _refused(f"'{key}' can not be specified without '{REGION}'", tensor)
        return None
    name = _value(tensor, parameters, REGION, "string_param")
    offset = _value(tensor, parameters, OFFSET, "int64_param") if OFFSET in parameters else 0
    if BYTE_SIZE not in parameters:
        raise _refused(f"'{BYTE_SIZE}' must be specified along with '{REGION}'", tensor)
    return SharedRegion(name, _value(tensor, parameters, BYTE_SIZE, "int64_param"), offset)


def _value(tensor: str, parameters: Mapping[str, pb.InferParameter], key: str, kind: str) -> Any:
    if parameters[key].WhichOneof("parameter_choice") != kind:
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}.",
        )
    return getattr(parameters[key], kind)


def _refused(what: str, tensor: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"{what} parameter for tensor '{tensor}'")
