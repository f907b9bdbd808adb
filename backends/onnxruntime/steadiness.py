"""Does every run of a model take about as long as any other of as many rows?"""

from collections.abc import Sequence
from pathlib import Path

from backends.onnxruntime.providers import CPU, Provider
from gateway.config import ModelConfig
from gateway.tensor import Datatype

LARGEST_BYTES = 1 << 20
"""A model file beyond this is never so short that it matters, and is not looked into."""

BY_VALUE = (
    *("If", "Loop", "Scan", "SequenceMap"),
    *("AffineGrid", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "MaxUnpool"),
    *("OneHot", "Pad", "Range", "Resize", "STFT", "Tile", "Upsample"),
    *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
)
"""Operators whose work depends on values: how often they repeat, or how much they make."""

FOREIGN = b"com.microsoft"
"""The domain of the library's own operators, some of which are loops."""

MARKS = (FOREIGN, *(b'"' + bytes([len(name)]) + name.encode() for name in BY_VALUE))
"""As a file has them: `op_type` is field 4 of NodeProto."""


def is_steady(config: ModelConfig, file: Path, providers: Sequence[Provider]) -> bool:
    """Whether the work is on this processor and depends on the number of rows only.

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
