"""The inputs and outputs of a model, and whether its runs take a steady time."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from backends.onnxruntime.providers import CPU, Provider
from gateway.batches.shapes import ANY_SIZE
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.tensor import Datatype
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor

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

DEFAULT_FILE = "model.onnx"


def signature(session: Any) -> ModelSignature:
    """The signature of a session's model; its initializers may be given as inputs too."""
    return ModelSignature(
        _by_name(session.get_inputs()),
        _by_name(session.get_outputs()),
        _by_name(session.get_overridable_initializers()),
    )


def _by_name(arguments: Iterable[Any]) -> dict[str, ModelTensor]:
    return {
        each.name: ModelTensor(
            each.name, each.type, ELEMENT_TYPES.get(each.type), _dims(each.shape)
        )
        for each in arguments
    }


def _dims(shape: Sequence[int | str | None]) -> tuple[int, ...]:
    """The dims; also those of an unknown rank are empty."""
    return tuple(size if isinstance(size, int) else ANY_SIZE for size in shape)


LARGEST_BYTES = 1 << 20
"""Larger model files are never short enough, and are not read."""

BY_VALUE = (
    *("If", "Loop", "Scan", "SequenceMap"),
    *("AffineGrid", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "MaxUnpool"),
    *("OneHot", "Pad", "Range", "Resize", "STFT", "Tile", "Upsample"),
    *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
)
"""Operators whose work depends on values, such as counts of repetitions or sizes."""

FOREIGN = b"com.microsoft"
"""The domain of the library's own operators, some of which are loops."""

MARKS = (FOREIGN, *(b'"' + bytes([len(name)]) + name.encode() for name in BY_VALUE))
"""Their bytes in a file: `op_type` is field 4 of NodeProto."""


def is_steady(config: ModelConfig, file: Path, providers: Sequence[Provider]) -> bool:
    """Whether the work is on the CPU and depends only on the number of rows.

    True only for small files of operators that ONNX itself defines, without loops, branches and
    sizes that are values, whose inputs are numbers and have a fixed size.
    """
    on_cpu = all(name == CPU for name, _ in providers)
    fixed = all(
        -1 not in each.dims and each.datatype is not Datatype.BYTES and not each.allow_ragged_batch
        for each in config.input
    )
    if not on_cpu or not fixed or config.batch_input or config.model_operations:
        return False
    if file.suffix == ".ort" or file.stat().st_size > LARGEST_BYTES:
        return False
    content = file.read_bytes()
    return not any(mark in content for mark in MARKS)
