"""The files of a model, its inputs and outputs, and whether its runs take a steady time."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.onnxruntime.providers import CPU, Provider
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype

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

DEFAULT = "model.onnx"


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
