"""Decoding of a ModelInferRequest into an InferRequest; the only I/O is reading shared memory."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gateway.admission.deadlines import Wishes, deadline_of
from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.parameters import HeaderForwarding, InferParameters, read_parameters
from gateway.frontends.grpc.protobuf_wire import (
    LargeMessage,
    Message,
    parse_large,
    parse_request,
    read_contents,
    takes_long,
)
from gateway.frontends.grpc.status import Metadata
from gateway.messages import (
    MOST_OUTPUTS,
    Deadline,
    InferRequest,
    RequestedOutput,
    SharedRegion,
    asked_once,
    request_prefix,
    too_many_outputs,
)
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import NUMPY_TYPES, Buffer, Datatype, Tensor
from gateway.threads import LARGE_BYTES

CLASSIFICATION = "classification"
REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"

CONTENTS = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: "int_contents",
    Datatype.INT16: "int_contents",
    Datatype.INT32: "int_contents",
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: "uint_contents",
    Datatype.UINT16: "uint_contents",
    Datatype.UINT32: "uint_contents",
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
"""The field of InferTensorContents for each datatype; FP16 and BF16 have raw contents only."""

WIDEST = {contents: datatype for datatype, contents in CONTENTS.items()}
"""The datatype of the elements of each field, which Triton's errors name."""

PART_ELEMENTS = 1 << 15
"""Elements converted in one call, which holds the interpreter lock."""

Contents = Mapping[int, memoryview]
"""Typed contents that were cut out of a message, by index of input."""
NO_CONTENTS: Contents = MappingProxyType({})

DATATYPES = {datatype.value: datatype for datatype in Datatype}
INVALID = "<invalid>"
"""Triton's name of an unknown datatype."""


class DecodedRequest:
    """The result of decoding a large message in a thread: a request or an error."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: InferRequest | InferenceError) -> None:
        self._outcome = outcome

    def request(self) -> InferRequest:
        """The request; raises the InferenceError of a failed decoding."""
        if isinstance(self._outcome, InferenceError):
            raise self._outcome.again()
        return self._outcome


class RequestDecoder:
    """Decodes the requests of one RPC, and forwards metadata of the RPC to each."""

    __slots__ = ("_forwarding", "_rpc", "_shared_memory", "_wishes", "caller", "metadata")

    def __init__(
        self,
        shared_memory: SharedMemory,
        forwarding: HeaderForwarding,
        metadata: Metadata,
        caller: Caller | None = None,
        wishes: Wishes | None = None,
        rpc: Deadline | None = None,
    ) -> None:
        self.caller, self._wishes, self._rpc = caller, wishes, rpc
        self._shared_memory = shared_memory if caller is None else shared_memory.of(caller)
        self._forwarding, self.metadata = forwarding, metadata

    def decode(
        self,
        message: pb.ModelInferRequest,
        raw: Sequence[Buffer] | DecodedRequest,
        config: ModelConfig,
        contents: Contents = NO_CONTENTS,
    ) -> InferRequest:
        """A request for a model with this config; InferenceError with Triton's texts.

        `raw` are the raw contents, or an earlier result of decoding the whole message.
        `contents` are typed contents that were cut out of the message.
        """
        if isinstance(raw, DecodedRequest):
            return raw.request()
        received_ns = time.perf_counter_ns()
        given = message.parameters
        parameters = read_parameters(given) if given else InferParameters()
        if self._forwarding.enabled:
            parameters.custom.update(self._forwarding.select(self.metadata))
        reader = _InputReader(message, raw, config, self._shared_memory, contents)
        return InferRequest(
            model=message.model_name,
            version=message.model_version,
            id=message.id,
            # A slice is a list, which iterates faster than a sequence of protobuf.
            inputs=tuple([reader.read(tensor) for tensor in message.inputs[:]]),
            outputs=self._outputs(message.outputs[:]),
            parameters=parameters.custom,
            sequence=parameters.sequence(self.caller) if parameters.sequence_tags else None,
            priority=parameters.priority,
            timeout_us=parameters.timeout_us,
            received_ns=received_ns,
            caller=self.caller,
            deadline=deadline_of(self._wishes, received_ns) if self._wishes else self._rpc,
        )

    def _outputs(self, given: Sequence[Any]) -> tuple[RequestedOutput, ...]:
        if len(given) > MOST_OUTPUTS:
            raise too_many_outputs(len(given))
        found = [self._output(output) for output in given]
        return tuple(found) if len(found) < 2 else asked_once(found)

    def _output(self, output: Any) -> RequestedOutput:
        if output.parameters:
            return self._special_output(output.name, output.parameters)
        return RequestedOutput(output.name)

    def _special_output(
        self, name: str, parameters: Mapping[str, pb.InferParameter]
    ) -> RequestedOutput:
        region = read_region(name, parameters)
        classes = _classes(parameters)
        if region is None:
            return RequestedOutput(name, classes)
        if classes:
            raise InferenceError(
                Code.INVALID_ARG,
                "output can't set both 'shared_memory_region' and 'classification'",
            )
        return RequestedOutput(name, region=self._shared_memory.locate(region))


def _classes(parameters: Mapping[str, pb.InferParameter]) -> int:
    if CLASSIFICATION not in parameters:
        return 0
    found = parameters[CLASSIFICATION]
    if found.WhichOneof("parameter_choice") != "int64_param":
        raise InferenceError(
            Code.INVALID_ARG,
            "invalid value type for 'classification' parameter, expected int64_param",
        )
    if found.int64_param <= 0:
        raise InferenceError(
            Code.INVALID_ARG, "invalid value for 'classification' parameter, expected >= 0"
        )
    return found.int64_param


class _InputReader:
    """Reads the inputs of one message in order: raw, typed, or in shared memory (protocol 18.3).

    The inputs outside shared memory consume the raw contents in order. Raises InferenceError with
    Triton's texts.
    """

    def __init__(
        self,
        message: pb.ModelInferRequest,
        raw: Sequence[Buffer],
        config: ModelConfig,
        shared_memory: SharedMemory,
        contents: Contents = NO_CONTENTS,
    ) -> None:
        self._message = message
        self._raw = iter(raw)
        self._large = contents
        self._index = -1
        self._has_raw = bool(raw)
        self._config = config
        self._shared_memory = shared_memory

    def read(self, tensor: Any) -> Tensor:
        """One input; its data is a view where possible."""
        name = tensor.name
        self._index += 1
        datatype = DATATYPES.get(tensor.datatype)
        region = read_region(name, tensor.parameters) if tensor.parameters else None
        if region is not None:
            self._refuse_contents(tensor, "unexpected 'content' provided when using shared memory")
            data: Any = self._shared_memory.read(region, datatype)
        elif self._has_raw:
            data = self._next_raw(tensor)
        else:
            data = self._contents(tensor, datatype)
        if datatype is None:
            raise self._unknown_datatype(name)
        return Tensor(name, datatype, tuple(tensor.shape[:]), data)

    def _next_raw(self, tensor: Any) -> Buffer:
        if tensor.HasField("contents"):
            raise InferenceError(
                Code.INVALID_ARG,
                "contents field must not be specified when using raw_input_contents for "
                f"'{tensor.name}' for model '{self._message.model_name}'",
            )
        data = next(self._raw, None)
        if data is None:
            raise self._without_data(tensor.name)
        return data

    def _refuse_contents(self, tensor: Any, what: str) -> None:
        if tensor.HasField("contents"):
            raise self._refused(f"{what} for input", tensor.name, "")

    def _contents(self, tensor: Any, datatype: Datatype | None) -> Buffer | tuple[bytes, ...]:
        if not tensor.HasField("contents"):
            raise self._without_data(tensor.name)
        if (view := self._large.get(self._index)) is not None:
            return self._large_contents(tensor.name, datatype, view)
        populated = [found.name for found, _ in tensor.contents.ListFields()]
        if not populated:
            return b""
        if datatype is None or populated != [CONTENTS.get(datatype)]:
            raise self._unexpected_contents(tensor.name, datatype, populated[0])
        return _elements(getattr(tensor.contents, populated[0]), populated[0], datatype)

    def _large_contents(self, name: str, datatype: Datatype | None, view: memoryview) -> Buffer:
        found = read_contents(view)
        if not found.populated:
            return b""
        if datatype is None or found.populated != [CONTENTS.get(datatype)]:
            raise self._unexpected_contents(name, datatype, found.populated[0])
        return found.as_datatype(datatype, NUMPY_TYPES.get(datatype))

    def _unexpected_contents(
        self, name: str, datatype: Datatype | None, first: str
    ) -> InferenceError:
        what = ", binary data was already supplied."
        if datatype is None or first != CONTENTS.get(datatype):
            expected = INVALID if datatype is None else datatype
            what = f" of type '{WIDEST[first]}', expected datatype '{expected}'"
        return self._refused("unexpected explicit tensor data for input", name, what)

    def _refused(self, what: str, name: str, more: str) -> InferenceError:
        text = f"{what} tensor '{name}' for model '{self._message.model_name}'{more}"
        return InferenceError(Code.INVALID_ARG, text)

    def _without_data(self, name: str) -> InferenceError:
        return self._refused("unable to find data for input", name, " in request.")

    def _unknown_datatype(self, name: str) -> InferenceError:
        model = self._message.model_name
        for expected in self._config.input:
            if expected.name == name:
                return InferenceError(
                    Code.INVALID_ARG,
                    f"{request_prefix(self._message.id)}inference input '{name}' data-type is "
                    f"'{INVALID}', but model '{model}' expects '{expected.datatype}'",
                )
        return InferenceError(
            Code.INVALID_ARG, f"unexpected inference input '{name}' for model '{model}'"
        )


def _elements(values: Any, contents: str, datatype: Datatype) -> Buffer | tuple[bytes, ...]:
    if datatype is Datatype.BYTES:
        return tuple(values)
    # Without a dtype numpy converts integers to floats if some fit uint64 only.
    widest, dtype = NUMPY_TYPES[WIDEST[contents]], NUMPY_TYPES[datatype]
    if len(values) <= PART_ELEMENTS:
        return np.array(values, dtype=widest).astype(dtype).tobytes()
    parts = (values[at : at + PART_ELEMENTS] for at in range(0, len(values), PART_ELEMENTS))
    return b"".join([np.array(part, dtype=widest).astype(dtype).tobytes() for part in parts])


def read_region(tensor: str, parameters: Mapping[str, pb.InferParameter]) -> SharedRegion | None:
    """The shared memory region in a tensor's parameters, or None (protocol: shared memory, 12.3).

    Raises InferenceError with Triton's texts.
    """
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


def address(dataplane: DataPlane, message: pb.ModelInferRequest, caller: Caller | None) -> None:
    """Write the model and the version into a message that names them as `m@label`."""
    if "@" in message.model_name:
        found = dataplane.address(message.model_name, message.model_version, caller)
        message.model_name, message.model_version = found


class LargeMessages:
    """Parses, decodes and checks ModelInferRequests above LARGE_BYTES in a thread.

    A message that is large only because of raw numbers is parsed on the event loop.
    """

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._threads = dataplane.threads

    async def prepare(self, data: bytes, decoder: RequestDecoder) -> Message:
        """The message, with a DecodedRequest as raw contents if a thread has decoded it.

        Raises DecodeError for bytes that are not a message.
        """
        if takes_long(data):
            large = await self._threads.run(parse_large, data)
        else:
            large = LargeMessage(*parse_request(data), {})
        message, raw, contents = large
        if not contents and not _has_large_strings(large):
            return message, raw
        address(self._dataplane, message, decoder.caller)
        try:
            name, version = message.model_name, message.model_version
            model = self._dataplane.model(name, version, decoder.caller)
        except InferenceError:
            return message, raw  # the method refuses the request before it decodes inputs
        return message, await self._threads.run(_decoded, decoder, large, model)


def _has_large_strings(large: LargeMessage) -> bool:
    message, raw, _ = large
    return any(len(each) > LARGE_BYTES for each in raw) and _has_strings(message)


def _has_strings(message: pb.ModelInferRequest) -> bool:
    return any(each.datatype == Datatype.BYTES for each in message.inputs)


def _decoded(decoder: RequestDecoder, large: LargeMessage, model: Model) -> DecodedRequest:
    message, raw, contents = large
    try:
        return DecodedRequest(model.checked(decoder.decode(message, raw, model.config, contents)))
    except InferenceError as error:
        return DecodedRequest(error.again())
