"""Recorded streams of ModelStreamInfer, and the messages that resume them."""

from collections.abc import Callable
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.protos import grpc_service_pb2 as pb
from gateway.resumption.reader import EventId, RecordingReader
from gateway.resumption.recording import RESUMABLE, RecordedRequest
from gateway.resumption.recordings import Recordings
from gateway.stream import ResponseStream

RESUME = "resume"
"""Request parameter: token of the stream to resume."""
RESUME_AFTER = "resume_after"
"""Request parameter: number of the last response that the client has received."""


def resumes(message: pb.ModelInferRequest) -> bool:
    """Whether a message resumes a stream."""
    return RESUME in message.parameters


async def resumed(
    recordings: Recordings, message: pb.ModelInferRequest, caller: Caller | None = None
) -> RecordingReader:
    """The rest of a recorded stream of the same model and tenant.

    NOT_FOUND for an unknown stream, INVALID_ARG for an invalid parameter.
    """
    token = _given(message, RESUME, "string_param")
    after = (
        _given(message, RESUME_AFTER, "int64_param") if RESUME_AFTER in message.parameters else 0
    )
    if after < 0:
        raise InferenceError(
            Code.INVALID_ARG, f"parameter '{RESUME_AFTER}' is {after}, expected 0 or more"
        )
    return await recordings.resume_anywhere(EventId(token, after), _place(message), caller)


def recorded(
    recordings: Recordings,
    message: pb.ModelInferRequest,
    request: InferRequest,
    model: Model,
    submit: Callable[[], ResponseStream],
) -> RecordingReader:
    """The recorded stream of a request; INVALID_ARG if the model is not decoupled."""
    if not model.decoupled:
        raise InferenceError(
            Code.INVALID_ARG,
            f"parameter '{RESUMABLE}' is for models that answer with a stream of responses, and "
            f"model '{model.name}' is not decoupled",
        )
    asked = RecordedRequest(_place(message), model, request)
    return recordings.open(asked, submit)


def _place(message: pb.ModelInferRequest) -> str:
    return f"ModelStreamInfer {message.model_name}/{message.model_version}"


def _given(message: pb.ModelInferRequest, name: str, kind: str) -> Any:
    found = message.parameters[name]
    if found.WhichOneof("parameter_choice") != kind:
        raise InferenceError(
            Code.INVALID_ARG, f"invalid value type for '{name}' parameter, expected {kind}."
        )
    return getattr(found, kind)
