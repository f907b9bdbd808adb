"""Data types of a configuration, and the datatypes of the protocol."""

from enum import StrEnum
from typing import Self

from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype


class DataType(StrEnum):
    """Data types by their names in `config.pbtxt`."""

    TYPE_INVALID = "TYPE_INVALID"
    TYPE_BOOL = "TYPE_BOOL"
    TYPE_UINT8 = "TYPE_UINT8"
    TYPE_UINT16 = "TYPE_UINT16"
    TYPE_UINT32 = "TYPE_UINT32"
    TYPE_UINT64 = "TYPE_UINT64"
    TYPE_INT8 = "TYPE_INT8"
    TYPE_INT16 = "TYPE_INT16"
    TYPE_INT32 = "TYPE_INT32"
    TYPE_INT64 = "TYPE_INT64"
    TYPE_FP16 = "TYPE_FP16"
    TYPE_FP32 = "TYPE_FP32"
    TYPE_FP64 = "TYPE_FP64"
    TYPE_STRING = "TYPE_STRING"
    TYPE_BF16 = "TYPE_BF16"

    @classmethod
    def of(cls, datatype: Datatype) -> Self:
        """The data type of a datatype."""
        return cls("TYPE_STRING" if datatype is Datatype.BYTES else f"TYPE_{datatype}")

    @property
    def datatype(self) -> Datatype:
        """The datatype of this data type; InferenceError for TYPE_INVALID, which has none."""
        if self is DataType.TYPE_INVALID:
            raise InferenceError(
                Code.INVALID_ARG, f"found data type {self}, expected one that tensors can have"
            )
        if self is DataType.TYPE_STRING:
            return Datatype.BYTES
        return Datatype(self.removeprefix("TYPE_"))
