"""Which data type is meant by what ONNX Runtime says of a tensor?"""

from gateway.config.data_type import DataType

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
"""Sequences, maps, sparse tensors and the narrow floats are not among them."""
