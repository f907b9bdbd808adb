"""Strings of runtimes whose strings are texts, not bytes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.errors import Code, InferenceError
from gateway.tensor import Tensor


def unicode_strings(tensor: Tensor, model: str, whose: str) -> npt.NDArray[Any]:
    """The elements of a BYTES input as an array of objects in its shape.

    Raises InferenceError INVALID_ARG for an element that is not UTF-8; `whose` strings are texts.
    """
    strings: npt.NDArray[Any] = np.empty(tensor.count, dtype=np.object_)
    try:
        strings[:] = [element.decode() for element in tensor.elements()]
    except UnicodeDecodeError as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"input '{tensor.name}' of model '{model}' has an element that is not UTF-8 "
            f"({error.reason} at byte {error.start}), which strings of {whose} are",
        ) from None
    return strings.reshape(tensor.shape)
