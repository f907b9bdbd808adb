"""The model's file and libraries in its version folder, and whether its runs take a steady time."""

import os
from collections.abc import Sequence
from pathlib import Path

from backends.onnxruntime.providers import CPU, Provider
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype

DEFAULT = "model.onnx"


def find_model(config: ModelConfig, folder: Path) -> Path:
    """The model's file: the one that the config names, or `model.onnx` in a folder of that name.

    Raises InferenceError UNAVAILABLE, as Triton, if it is missing, and INVALID_ARG for a name
    outside of the version folder.
    """
    name = config.default_model_filename or DEFAULT
    file = _below(folder, folder, name, config)
    if file.is_dir():
        file = file / DEFAULT
    if not file.is_file():
        shown = Path(folder.name, file.relative_to(folder))
        raise InferenceError(
            Code.UNAVAILABLE,
            f"unable to find '{shown}' for model instance '{config.name}'",
        )
    return file


def find_libraries(config: ModelConfig, folder: Path) -> list[Path]:
    """The libraries of custom operations, in the version folder or else in the model's.

    Raises InferenceError INVALID_ARG for one that is missing or outside: a client may send a
    config, and must not name a library of the host.
    """
    operations = config.model_operations
    names = operations.op_library_filename if operations else ()
    return [_find_library(config, folder, name) for name in names]


def _find_library(config: ModelConfig, folder: Path, name: str) -> Path:
    for place in (folder, folder.parent):
        found = _below(folder.parent, place, name, config)
        if found.is_file():
            return found
    raise InferenceError(
        Code.INVALID_ARG,
        f"unable to find the library of custom operations '{name}' of model '{config.name}' in its "
        "folder or version folder",
    )


def _below(outermost: Path, folder: Path, name: str, config: ModelConfig) -> Path:
    """The path of a name in `folder`; links may lead anywhere, names may not."""
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or not path.is_relative_to(outermost) or path == outermost:
        raise InferenceError(
            Code.INVALID_ARG,
            f"file '{name}' of model '{config.name}' is outside of the model's folder",
        )
    return path


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
