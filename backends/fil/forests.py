"""Forests of any library."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from gateway.errors import Code, InferenceError

Array = npt.NDArray[Any]
Errors = tuple[type[Exception], ...]

BLOCK = 64
"""The rows that one thread predicts alone; XGBoost gives no less to a thread."""


class Forest(Protocol):
    """A forest in memory; its predictions let the interpreter lock go.

    `classes` is the number of predictions per row: 1 for binary classes. `explains`: it has
    contributions. `errors` are the library's exceptions. Rows are FP32, C-contiguous, with
    `features` columns; NaN is a missing value.
    """

    features: int
    classes: int
    classifies: bool
    explains: bool
    errors: Errors

    def predict(self, rows: Array) -> Array:
        """The predictions of each row, in FP32."""

    def contributions(self, rows: Array) -> Array:
        """For each class the contribution of each feature to the margin, then the bias."""


@dataclass(frozen=True, slots=True)
class ForestLibrary:
    """A library that reads files: its name and version, its exceptions, and the way to read.

    `read` gets the file, its content, and the number of threads of a prediction.
    """

    name: str
    errors: Errors
    read: Callable[[Path, bytes, int], Forest]


def require_one_target(targets: int) -> None:
    """Raise InferenceError UNKNOWN for a forest of several targets, as Triton."""
    if targets > 1:
        raise InferenceError(Code.UNKNOWN, "Multi-target model not supported")


def threads_for(rows: Array, most: int) -> int:
    """One thread per block: on a busy machine threads wait for each other for milliseconds."""
    return max(1, min(most, len(rows) // BLOCK))
