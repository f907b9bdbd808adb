"""Resumable streams: parameters of requests and responses (resumption on another RPC)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Parameter
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.resumption.reader import EventId, RecordingReader, Responses
from gateway.resumption.recording import RESUMABLE, RecordedRequest
from gateway.resumption.recordings import Recordings
from gateway.stream import ResponseStream

RESUME = "resume"
"""Request parameter: token of the stream to resume."""
RESUME_AFTER = "resume_after"
"""Request parameter: number of the last response that the client has received."""
EVENT = "sluice_event"
"""Response parameter: number of the response in its stream, from 1."""
STREAM = "sluice_stream"
"""Response parameter of the first response: token of the stream."""


def resumes(message: pb.ModelInferRequest) -> bool:
    """Whether a message resumes a stream."""
    return RESUME in message.parameters


def resumed(recordings: Recordings, message: pb.ModelInferRequest) -> RecordingReader:
    """The rest of a recorded stream of the same model.

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
    return recordings.resume(EventId(token, after), _place(message))


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
    return recordings.open(RecordedRequest(_place(message), model, request), submit)


def marked(stream: Responses, batch: Sequence[InferResponse]) -> Sequence[InferResponse]:
    """The responses of the latest batch, with the parameters that a client needs to resume."""
    if not isinstance(stream, RecordingReader):
        return batch
    return [_marked(stream, event, response) for event, response in stream.numbered(batch)]


def _marked(stream: RecordingReader, event: EventId, response: InferResponse) -> InferResponse:
    told: dict[str, Parameter] = {EVENT: event.number}
    if stream.begins_with(event):
        told[STREAM] = event.token
    return replace(response, parameters={**response.parameters, **told})


def _place(message: pb.ModelInferRequest) -> str:
    return f"ModelStreamInfer {message.model_name}/{message.model_version}"


def _given(message: pb.ModelInferRequest, name: str, kind: str) -> Any:
    found = message.parameters[name]
    if found.WhichOneof("parameter_choice") != kind:
        raise InferenceError(
            Code.INVALID_ARG, f"invalid value type for '{name}' parameter, expected {kind}."
        )
    return getattr(found, kind)
