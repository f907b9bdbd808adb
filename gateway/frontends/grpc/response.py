"""Encoding of an InferResponse into a ModelInferResponse (protocol 18.5); no I/O."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from gateway.classification import classify
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc import protobuf_wire
from gateway.frontends.grpc.parameters import FINAL, set_parameter
from gateway.messages import InferRequest, InferResponse, Parameter
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import LENGTH_BYTES, Buffer, Datatype, Tensor

MAX_MESSAGE_BYTES = 2**31 - 1


class InferResponseEncoder:
    """Encodes the responses to one request, each output as the request demands.

    Outputs in shared memory are written there; other outputs are copied once, into the message.
    """

    __slots__ = ("_directed", "_head", "_model", "_request", "_shared_memory")

    def __init__(self, request: InferRequest, model: Model, shared_memory: SharedMemory) -> None:
        self._request = request
        self._model = model
        self._shared_memory = shared_memory
        self._head = _head(request.model, model.version, request.id)
        # Outputs that are classified, or written into shared memory.
        self._directed = {
            each.name: each for each in request.outputs if each.classes or each.region
        }

    def encode(self, response: InferResponse) -> bytes:
        """A ModelInferResponse; INVALID_ARG above MAX_MESSAGE_BYTES."""
        parts = self._parts(response, self._head)
        return _joined(parts, sum(map(len, parts)))

    def encode_streamed(self, response: InferResponse) -> bytes:
        """A ModelStreamInferResponse with the final flag and the error, if any."""
        head = self._head
        if not response.outputs:
            # Without outputs the version is the requested one (protocol 19.3).
            request = self._request
            if not request.version or request.version.isdigit():
                head = _head(request.model, request.version, request.id)
        parts = self._parts(response, head)
        parts.append(_FINAL if response.final else _NOT_FINAL)
        size = sum(map(len, parts))
        before = protobuf_wire.sized(protobuf_wire.INFER_RESPONSE, size)
        if response.error is not None:
            before = _error(response.error) + before
        parts.insert(0, before)
        return _joined(parts, len(before) + size)

    def encode_texts(self, name: str, texts: Sequence[bytes]) -> list[bytes] | None:
        """As `encode_streamed` of the `response_of_text` of each; None if it has to encode them."""
        if name in self._directed:
            return None
        head, messages = self._head, []
        for text in texts:
            before = _before_text(name, len(text))
            size = len(head) + len(before) + len(text) + len(_NOT_FINAL)
            messages.append(b"".join((_opened(size), head, before, text, _NOT_FINAL)))
        return messages

    def _parts(self, response: InferResponse, head: bytes) -> list[Buffer]:
        parts: list[Buffer] = [head]
        if response.parameters:
            parts.append(_parameters(response.parameters))
        for output in response.outputs:
            asked = self._directed.get(output.name)
            if asked is not None and asked.classes:
                output = self._classified(output, asked.classes)
            raw: Buffer = b""
            if asked is not None and asked.region is not None:
                self._shared_memory.write(asked.region, output)
            else:
                raw = output.raw()
            parts.append(_before_raw(output.name, output.datatype, output.shape, len(raw)))
            parts.append(raw)
        return parts

    def _classified(self, output: Tensor, classes: int) -> Tensor:
        labels = self._model.labels.get(output.name, ())
        return classify(output, classes, labels, batching=self._model.config.batching)


def _joined(parts: list[Buffer], size: int) -> bytes:
    """One message of `size` bytes in all."""
    if size > MAX_MESSAGE_BYTES:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Response has byte size {size} which exceeds gRPC's byte size limit "
            f"{MAX_MESSAGE_BYTES}.",
        )
    return b"".join(parts)


def _head(model: str, version: str, request_id: str) -> bytes:
    head = _model(model, version)
    if not request_id:
        return head
    return head + pb.ModelInferResponse(id=request_id).SerializeToString()


@lru_cache(1024)
def _model(name: str, version: str) -> bytes:
    return pb.ModelInferResponse(model_name=name, model_version=version).SerializeToString()


@lru_cache(1024)
def _before_raw(name: str, datatype: Datatype, shape: tuple[int, ...], size: int) -> bytes:
    """The description of an output, and the tag and length of its `size` bytes of data."""
    message = pb.ModelInferResponse()
    message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString() + protobuf_wire.sized(protobuf_wire.RAW_OUTPUT, size)


@lru_cache(1024)
def _before_text(name: str, size: int) -> bytes:
    """As `_before_raw` of an output with one element of BYTES, and its length."""
    described = _before_raw(name, Datatype.BYTES, (1,), LENGTH_BYTES + size)
    return described + size.to_bytes(LENGTH_BYTES, "little")


@lru_cache(1024)
def _opened(size: int) -> bytes:
    """The tag and length of a ModelInferResponse of `size` bytes in a ModelStreamInferResponse."""
    return protobuf_wire.sized(protobuf_wire.INFER_RESPONSE, size)


def _parameters(parameters: Mapping[str, Parameter]) -> bytes:
    message = pb.ModelInferResponse()
    for key, found in parameters.items():
        set_parameter(message.parameters[key], found)
    return message.SerializeToString()


def _error(error: InferenceError) -> bytes:
    return pb.ModelStreamInferResponse(error_message=error.message).SerializeToString()


_FINAL = _parameters({FINAL: True})
_NOT_FINAL = _parameters({FINAL: False})
