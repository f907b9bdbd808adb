"""The inputs of a ModelInferRequest: raw, typed, or in shared memory (protocol 18.3)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.regions import read_region
from gateway.frontends.grpc.typed_contents import read_contents
from gateway.messages import request_prefix
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import NUMPY_TYPES, Buffer, Datatype, Tensor

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
"""Which field of InferTensorContents carries a datatype; FP16 and BF16 travel raw only."""

WIDEST = {contents: datatype for datatype, contents in CONTENTS.items()}
"""The datatype of each field: its elements', and what a field that does not fit is called."""

PART_ELEMENTS = 1 << 15
"""Elements that are converted at once: a call holds the interpreter lock."""

Contents = Mapping[int, memoryview]
"""Typed contents that were cut out of a message, by the index of their input."""
NO_CONTENTS: Contents = MappingProxyType({})

DATATYPES = {datatype.value: datatype for datatype in Datatype}
INVALID = "<invalid>"
"""How Triton calls a datatype that it does not know."""


class InputReader:
    """Reads the inputs of one message in their order.

    `raw` are its raw contents, which the inputs that are not in shared memory consume in order.
    Raises InferenceError with Triton's texts.
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
        """One input; its data is a view where the message allows it."""
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
    # Without its type, numpy makes floats of integers of which some fit only uint64.
    widest, dtype = NUMPY_TYPES[WIDEST[contents]], NUMPY_TYPES[datatype]
    if len(values) <= PART_ELEMENTS:
        return np.array(values, dtype=widest).astype(dtype).tobytes()
    parts = (values[at : at + PART_ELEMENTS] for at in range(0, len(values), PART_ELEMENTS))
    return b"".join([np.array(part, dtype=widest).astype(dtype).tobytes() for part in parts])
