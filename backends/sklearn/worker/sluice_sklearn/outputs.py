"""Tensors of what an estimator returns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from sluice_worker.errors import BadAnswer
from sluice_worker.tensor import TRITON_STRING_TO_NUMPY, name_of

from .inputs import ANY_SIZE, dims_of

METHODS = ("predict", "predict_proba", "decision_function", "transform")
"""The methods that may be outputs."""


class InvalidOutput(Exception):
    """An estimator returned what is no tensor of the protocol; the text is for clients."""


def methods_of(estimator: Any) -> list[str]:
    """The methods that an estimator has."""
    return [name for name in METHODS if callable(getattr(estimator, name, None))]


def array_of(found: Any, method: str) -> Any:
    """The array that a method returned; texts as objects."""
    if isinstance(found, list):
        raise InvalidOutput(f"'{method}' is one array per target, which is no tensor")
    dense = found.toarray() if hasattr(found, "toarray") else found
    array = np.asarray(dense)
    if array.dtype.kind in "US":
        array = array.astype(object)
    if array.ndim == 0 or name_of(array.dtype) is None:
        raise InvalidOutput(f"'{method}' is {array.dtype} of {array.ndim} dimensions, no tensor")
    return array


class OutputWriter:
    """Writes tensors with the data types and dims of the config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        batched = int(config.get("max_batch_size", 0)) > 0
        self._types = {
            each["name"]: np.dtype(TRITON_STRING_TO_NUMPY[each["data_type"]])
            for each in config.get("output", ())
        }
        self._dims = {
            each["name"]: [*([ANY_SIZE] if batched else []), *dims_of(each)]
            for each in config.get("output", ())
        }

    def cast(self, method: str, array: Any) -> Any:
        """The array with the config's data type and dims; InvalidOutput if it has others."""
        wanted, dims = self._types[method], self._dims[method]
        if array.dtype == object:
            array = _encoded(array)
        if not np.can_cast(array.dtype, wanted, "same_kind"):
            raise InvalidOutput(
                f"'{method}' is {name_of(array.dtype)} from the estimator, but the configuration "
                f"expects {name_of(wanted)}"
            )
        # A client may ask for one value per row as [rows] or as [rows, 1].
        if array.ndim == 1 and len(dims) == 2:
            array = array.reshape(-1, 1)
        elif array.ndim == 2 and array.shape[1] == 1 and len(dims) == 1:
            array = array.reshape(-1)
        shape = list(array.shape)
        if not _fits(shape, dims):
            raise InvalidOutput(
                f"'{method}' has shape {shape} from the estimator, but the configuration expects "
                f"{dims}"
            )
        return array.astype(wanted, copy=False)


def tensor(name: str, array: Any) -> Any:
    """An output; the array may be a part of a larger one."""
    return pb_utils.Tensor(name, np.ascontiguousarray(array))


def _encoded(array: Any) -> Any:
    """Labels as bytes."""
    labels = [each if type(each) is bytes else str(each).encode() for each in array.ravel()]
    made = np.empty(len(labels), dtype=object)
    made[:] = labels
    return made.reshape(array.shape)


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(
        dim in (ANY_SIZE, size) for size, dim in zip(shape, dims, strict=True)
    )


def refuse_unknown(model: str, names: Sequence[str], methods: Sequence[str]) -> None:
    """Raise BadAnswer for an output that the estimator does not have."""
    for name in names:
        if name not in methods:
            raise BadAnswer(
                f"model '{model}': unexpected inference output '{name}', allowed outputs are: "
                f"{', '.join(methods)}",
                "INVALID_ARG",
            )
