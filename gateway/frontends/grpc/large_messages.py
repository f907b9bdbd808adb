"""Messages that are parsed, decoded and checked in a thread, because that would block the loop."""

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.frontends.grpc.protobuf_wire import (
    LargeMessage,
    Message,
    parse_large,
    parse_request,
    takes_long,
)
from gateway.frontends.grpc.request import Decoded, RequestDecoder
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.tensor import Datatype
from gateway.threads import LARGE_BYTES


class LargeMessages:
    """Prepares ModelInferRequests of more than LARGE_BYTES; the other ones need no thread.

    A message that is only large by the raw contents of numbers needs none, either.
    """

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._threads = dataplane.threads

    async def prepare(self, data: bytes, decoder: RequestDecoder) -> Message:
        """The message, whose raw contents may be Decoded; DecodeError if it is none."""
        if takes_long(data):
            large = await self._threads.run(parse_large, data)
        else:
            large = LargeMessage(*parse_request(data), {})
        message, raw, contents = large
        if not contents and not _has_large_strings(large):
            return message, raw
        try:
            model = self._dataplane.model(message.model_name, message.model_version)
        except InferenceError:
            return message, raw  # it is refused before its inputs are decoded
        return message, await self._threads.run(_decoded, decoder, large, model)


def _has_large_strings(large: LargeMessage) -> bool:
    message, raw, _ = large
    return any(len(each) > LARGE_BYTES for each in raw) and _has_strings(message)


def _has_strings(message: pb.ModelInferRequest) -> bool:
    return any(each.datatype == Datatype.BYTES for each in message.inputs)


def _decoded(decoder: RequestDecoder, large: LargeMessage, model: Model) -> Decoded:
    message, raw, contents = large
    try:
        return Decoded(model.checked(decoder.decode(message, raw, model.config, contents)))
    except InferenceError as error:
        return Decoded(error)
