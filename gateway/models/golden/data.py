"""Values of golden requests: lists in JSON, and arrays in an NPZ file."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.arrays import fitted, listed_tensor, to_array, typed_tensor
from gateway.config import ModelInput
from gateway.config.data_type import DataType
from gateway.data_files import DataFiles
from gateway.errors import InferenceError
from gateway.strict_json import refuse, shown
from gateway.tensor import Datatype, Tensor

MOST_BYTES = 64 << 20
"""Limit of the files of a model's `golden/`, of the arrays of one NPZ file, and of one answer."""
PREFIX = "npz:"

Array = npt.NDArray[Any]


class GoldenData:
    """Values of one golden request; its arrays are in the file `NAME.npz`.

    `read` reads them when one is needed; raises InferenceError, OSError, ValueError, EOFError or
    MemoryError.
    """

    def __init__(self, name: str, read: Callable[[], Mapping[str, Array]]) -> None:
        self._filename = f"{name}.npz"
        self._read = read
        self._arrays: Mapping[str, Array] | None = None

    def tensor(self, path: str, value: Any, name: str, datatype: Datatype) -> Tensor:
        """A value as a tensor of the datatype.

        `value` is a list, however nested, or `npz:KEY`. Raises INVALID_ARG with the path.
        """
        declared = ModelInput(name=name, data_type=DataType.of(datatype))
        given = value
        if isinstance(value, str):
            given = self._array(path, value)
        elif not isinstance(value, list):
            refuse(path, f"is {shown(value)}, expected a list or '{PREFIX}KEY'")
        try:
            typed = typed_tensor(name, given)
            tensor = listed_tensor(declared, given) if typed is None else fitted(typed, declared)
        except InferenceError as error:
            refuse(path, error.message)
        if tensor.datatype is not datatype and not tensor.count:
            tensor = replace(tensor, datatype=datatype)
        if tensor.datatype is not datatype:
            refuse(path, f"has {tensor.datatype}, expected {datatype}")
        return tensor

    def array(self, path: str, value: Any, name: str, datatype: Datatype) -> Array:
        """A value as an array of the datatype; raises as `tensor`."""
        return to_array(self.tensor(path, value, name, datatype))

    def _array(self, path: str, value: str) -> Array:
        if not value.startswith(PREFIX):
            refuse(path, f"is {shown(value)}, expected a list or '{PREFIX}KEY'")
        try:
            arrays = self._arrays = self._read() if self._arrays is None else self._arrays
        except InferenceError as error:
            refuse(path, f"is '{value}', but {error.message}")
        except (OSError, ValueError, EOFError, MemoryError) as error:
            refuse(path, f"is '{value}', but '{self._filename}' cannot be read: {error}")
        key = value.removeprefix(PREFIX)
        if key not in arrays:
            found = ", ".join(map(repr, arrays)) or "none"
            refuse(path, f"is '{value}', but '{self._filename}' has no such array, only {found}")
        return arrays[key]


def read_arrays(files: DataFiles, name: str) -> Mapping[str, Array]:
    """The arrays in the file `NAME.npz`; blocks, and raises as `GoldenData` says."""
    content = files.read(f"{name}.npz", MOST_BYTES + 1)
    # Few servers have NPZ files: the others do without the module.
    zipfile, zlib = import_module("zipfile"), import_module("zlib")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(each.file_size for each in archive.infolist())
        if size > MOST_BYTES:
            raise ValueError(f"it has {size} bytes of arrays, expected at most {MOST_BYTES}")
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return dict(archive)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, TokenError) as error:
        raise ValueError(str(error)) from None
