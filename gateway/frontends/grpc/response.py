"""Encoding of an InferResponse into a ModelInferResponse (protocol 18.5); no I/O."""

from collections.abc import Mapping
from functools import lru_cache

from gateway.classification import classify
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc import protobuf_wire
from gateway.frontends.grpc.parameters import FINAL, set_parameter
from gateway.messages import InferRequest, InferResponse, Parameter, RequestedOutput
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Buffer, Datatype, Tensor, value

MAX_MESSAGE_BYTES = 2**31 - 1


@value
class InferResponseEncoder:
    """Encodes the responses to one request, each output as the request demands.

    Outputs in shared memory are written there; other outputs are copied once, into the message.
    """

    request: InferRequest
    model: Model
    shared_memory: SharedMemory

    def encode(self, response: InferResponse) -> bytes:
        """A ModelInferResponse; INVALID_ARG above MAX_MESSAGE_BYTES."""
        return _joined(self._parts(response, self.model.version))

    def encode_streamed(self, response: InferResponse, asked_version: str) -> bytes:
        """A ModelStreamInferResponse with the final flag and the error, if any."""
        # Without outputs the version is the requested one (protocol 19.3).
        version = self.model.version if response.outputs else asked_version
        parts = self._parts(response, version)
        parts.append(_FINAL if response.final else _NOT_FINAL)
        size = sum(map(len, parts))
        error = b"" if response.error is None else _error(response.error)
        return _joined([error, protobuf_wire.sized(protobuf_wire.INFER_RESPONSE, size), *parts])

    def _parts(self, response: InferResponse, version: str) -> list[Buffer]:
        request = self.request
        parts: list[Buffer] = [_head(request.model, version, request.id)]
        if response.parameters:
            parts.append(_parameters(response.parameters))
        asked = {each.name: each for each in request.outputs if each.classes or each.region}
        for output in response.outputs:
            parts += self._output(output, asked.get(output.name))
        return parts

    def _output(self, output: Tensor, asked: RequestedOutput | None) -> list[Buffer]:
        if asked is not None and asked.classes:
            labels = self.model.labels.get(output.name, ())
            batching = self.model.config.batching
            output = classify(output, asked.classes, labels, batching=batching)
        described = _described(output.name, output.datatype, output.shape)
        if asked is not None and asked.region is not None:
            self.shared_memory.write(asked.region, output)
            return [described, protobuf_wire.sized(protobuf_wire.RAW_OUTPUT, 0)]
        raw = output.raw()
        return [described, protobuf_wire.sized(protobuf_wire.RAW_OUTPUT, len(raw)), raw]


def _joined(parts: list[Buffer]) -> bytes:
    size = sum(map(len, parts))
    if size > MAX_MESSAGE_BYTES:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Response has byte size {size} which exceeds gRPC's byte size limit "
            f"{MAX_MESSAGE_BYTES}.",
        )
    return b"".join(parts)


def _head(model: str, version: str, request_id: str) -> bytes:
    return pb.ModelInferResponse(
        model_name=model, model_version=version, id=request_id
    ).SerializeToString()


@lru_cache(1024)
def _described(name: str, datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    message = pb.ModelInferResponse()
    message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString()


def _parameters(parameters: Mapping[str, Parameter]) -> bytes:
    message = pb.ModelInferResponse()
    for key, found in parameters.items():
        set_parameter(message.parameters[key], found)
    return message.SerializeToString()


def _error(error: InferenceError) -> bytes:
    return pb.ModelStreamInferResponse(error_message=error.message).SerializeToString()


_FINAL = _parameters({FINAL: True})
_NOT_FINAL = _parameters({FINAL: False})
