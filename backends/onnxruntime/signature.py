"""Inputs and outputs of an ONNX model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError

BFLOAT16_KIND = "tensor(bfloat16)"
BFLOAT16 = 16
"""The number of bfloat16 in `onnx.TensorProto.DataType`."""

ELEMENT_TYPES = {
    "tensor(bool)": DataType.TYPE_BOOL,
    "tensor(uint8)": DataType.TYPE_UINT8,
    "tensor(uint16)": DataType.TYPE_UINT16,
    "tensor(uint32)": DataType.TYPE_UINT32,
    "tensor(uint64)": DataType.TYPE_UINT64,
    "tensor(int8)": DataType.TYPE_INT8,
    "tensor(int16)": DataType.TYPE_INT16,
    "tensor(int32)": DataType.TYPE_INT32,
    "tensor(int64)": DataType.TYPE_INT64,
    "tensor(float16)": DataType.TYPE_FP16,
    "tensor(float)": DataType.TYPE_FP32,
    "tensor(double)": DataType.TYPE_FP64,
    "tensor(string)": DataType.TYPE_STRING,
    BFLOAT16_KIND: DataType.TYPE_BF16,
}
"""Without sequences, maps, sparse tensors and the narrow floats."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One input or output of the model; -1 in `dims` is any size.

    The dims of a scalar are empty, and so are those of a tensor of unknown rank.
    """

    name: str
    kind: str
    dims: tuple[int, ...]

    @property
    def data_type(self) -> DataType:
        """Its data type; InferenceError UNSUPPORTED if the protocol has no such tensor."""
        found = ELEMENT_TYPES.get(self.kind)
        if found is None:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"'{self.name}' of the model is a {self.kind}; only tensors of the protocol's "
                "datatypes can be served",
            )
        return found


@dataclass(frozen=True, slots=True)
class OnnxSignature:
    """All inputs and outputs by name, as declared; `initializers` may be given as inputs too."""

    inputs: Mapping[str, ModelTensor]
    outputs: Mapping[str, ModelTensor]
    initializers: Mapping[str, ModelTensor]

    @classmethod
    def of(cls, session: Any) -> "OnnxSignature":
        """The signature of a session's model."""
        return cls(
            _by_name(session.get_inputs()),
            _by_name(session.get_outputs()),
            _by_name(session.get_overridable_initializers()),
        )


def _by_name(arguments: Iterable[Any]) -> dict[str, ModelTensor]:
    return {each.name: ModelTensor(each.name, each.type, _dims(each.shape)) for each in arguments}


def _dims(shape: Sequence[int | str | None]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in shape)
