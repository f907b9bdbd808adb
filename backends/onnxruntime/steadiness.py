"""Does every run of a model take about as long as any other of as many rows?"""

from collections.abc import Sequence
from pathlib import Path

from backends.onnxruntime.providers import CPU, Provider
from gateway.config import ModelConfig
from gateway.tensor import Datatype

LARGEST_BYTES = 1 << 20
"""A model file beyond this is never so short that it matters, and is not looked into."""

DATA_DEPENDENT = (b'"\x02If', b'"\x04Loop', b'"\x04Scan')
"""Operators whose work depends on values, as a file has them: `op_type` is field 4 of NodeProto."""


def is_steady(config: ModelConfig, file: Path, providers: Sequence[Provider]) -> bool:
    """Whether the work is on this processor and depends on the number of rows only.

    True only for small files of operators that ONNX itself defines, without loops and branches,
    whose inputs are numbers and have a fixed size.
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
    return not any(mark in content for mark in DATA_DEPENDENT)
