"""Comparisons of an output tensor with a golden answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway.arrays import to_array
from gateway.errors import InferenceError
from gateway.models.golden.data import Array, GoldenData
from gateway.strict_json import StrictObject, refuse, shown
from gateway.tensor import Datatype, Tensor, format_shape

TOLERANCES: Mapping[Datatype, tuple[float, float]] = {
    Datatype.FP64: (1e-9, 1e-12),
    Datatype.FP32: (1e-4, 1e-6),
    Datatype.FP16: (2e-2, 1e-3),
    Datatype.BF16: (2e-2, 1e-3),
}
"""Default `rtol` and `atol` by datatype; other datatypes are compared exactly."""
EXACT = (0.0, 0.0)
LEAST_COSINE = 0.99
"""Default of `min` for `cosine`."""


class Mismatch(Exception):
    """An answer is not the expected one; the message says how."""


TensorCheck = Callable[[Array], None]
"""Raises Mismatch for an output that is not the expected one."""


@dataclass(frozen=True, slots=True)
class OutputChecks:
    """The checks of an output of that datatype."""

    datatype: Datatype
    checks: Sequence[TensorCheck]

    def __call__(self, found: Tensor) -> None:
        if found.datatype is not self.datatype:
            raise Mismatch(f"datatype is {found.datatype}, expected {self.datatype}")
        try:
            array = to_array(found)
        except (ValueError, InferenceError):
            shape = format_shape(found.shape)
            raise Mismatch(f"data are no {found.datatype} of shape {shape}") from None
        for check in self.checks:
            check(array)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements within `atol + rtol * abs(expected)`, in order; exact if both are 0.

    The shape counts unless `expected` has one dimension. With `nan` NaN is equal to NaN.
    """

    expected: Array
    rtol: float = 0.0
    atol: float = 0.0
    nan: bool = False

    def __call__(self, found: Array) -> None:
        expected = self.expected
        if expected.ndim == 1 and found.size == expected.size:
            found, shape = found.reshape(-1), found.shape
        else:
            shape = found.shape
        if found.shape != expected.shape:
            wanted, has = format_shape(expected.shape), format_shape(found.shape)
            raise Mismatch(f"shape is {has}, expected {wanted}")
        differs, excess = self._compare(found)
        if count := int(differs.sum()):
            worst = int(np.where(differs, excess, -1.0).argmax())
            raise Mismatch(self._text(found, shape, worst, count))

    def _compare(self, found: Array) -> tuple[Array, Array]:
        """The elements that differ, and by how much more than allowed."""
        expected = self.expected
        differs = np.asarray(found != expected, dtype=bool)
        if found.dtype == np.object_:
            return differs, differs.astype(float)
        with np.errstate(all="ignore"):
            a, b = found.astype(np.float64), expected.astype(np.float64)
            allowed = self.atol + self.rtol * np.abs(b)
            excess = np.nan_to_num(np.abs(a - b) - allowed, nan=np.inf, posinf=np.inf)
            if self.rtol or self.atol:
                differs = differs & ~(np.isfinite(b) & (np.abs(a - b) <= allowed))
            if self.nan:
                differs = differs & ~(np.isnan(a) & np.isnan(b))
        return differs, np.maximum(excess, 0.0)

    def _text(self, found: Array, shape: tuple[int, ...], worst: int, count: int) -> str:
        index = format_shape([int(each) for each in np.unravel_index(worst, shape)])
        is_, expected = (_shown(each.reshape(-1)[worst]) for each in (found, self.expected))
        within = f" within {self.atol:g} + {self.rtol:g}*|expected|" if self.rtol else ""
        within = within or (f" within {self.atol:g}" if self.atol else "")
        return (
            f"element {index} is {is_}, expected {expected}{within} "
            f"({count} of {found.size} elements differ)"
        )


@dataclass(frozen=True, slots=True)
class Cosine:
    """Rows of the last axis with at least that cosine to the expected ones."""

    expected: Array
    least: float

    def __call__(self, found: Array) -> None:
        rows, expected = _rows(found), _rows(self.expected)
        if rows.shape != expected.shape:
            raise Mismatch(
                f"has {rows.shape[0]} rows of {rows.shape[1]} elements, expected "
                f"{expected.shape[0]} of {expected.shape[1]}"
            )
        with np.errstate(all="ignore"):
            products = (rows * expected).sum(axis=1)
            lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
            cosines = np.nan_to_num(products / lengths, nan=-1.0, posinf=-1.0, neginf=-1.0)
        wrong = cosines < self.least
        if wrong.any():
            worst = int(cosines.argmin())
            raise Mismatch(
                f"row {worst} has the cosine {cosines[worst]:.6g}, expected at least "
                f"{self.least:g} ({int(wrong.sum())} of {len(rows)} rows differ)"
            )


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes with the largest values of each row of the last axis, as sets."""

    expected: tuple[frozenset[int], ...]

    def __call__(self, found: Array) -> None:
        rows = _rows(found)
        if len(rows) != len(self.expected):
            raise Mismatch(f"has {len(rows)} rows, expected {len(self.expected)}")
        wrong = []
        for number, (row, expected) in enumerate(zip(rows, self.expected, strict=True)):
            best = np.argsort(-row, kind="stable")[: len(expected)].tolist()
            if np.isnan(row).any() or set(best) != expected:
                wrong.append((number, "NaN" if np.isnan(row).any() else best))
        if wrong:
            number, best = wrong[0]
            raise Mismatch(
                f"row {number} has the classes {best}, expected {sorted(self.expected[number])} "
                f"({len(wrong)} of {len(rows)} rows differ)"
            )


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1] if array.ndim else 1).astype(np.float64)


def _shown(element: Any) -> str:
    return repr(element.decode(errors="replace")) if isinstance(element, bytes) else f"{element}"


NAMES = ("equals", "close", "rtol", "atol", "nan", "cosine", "min", "argmax", "top")


def read_tensor_checks(
    members: StrictObject, name: str, datatype: Datatype, data: GoldenData
) -> list[TensorCheck]:
    """The checks of one output; raises INVALID_ARG with the path of a member."""

    def expected(kind: str) -> Array:
        return data.array(members.path(kind), members.take(kind), name, datatype)

    found: list[TensorCheck] = []
    if "equals" in members:
        found.append(Elements(expected("equals"), nan=members.flag("nan")))
    if datatype is Datatype.BYTES:
        return found
    if "close" in members:
        rtol, atol = _tolerances(members, datatype)
        found.append(Elements(expected("close"), rtol, atol, members.flag("nan")))
    if "cosine" in members:
        least = members.number("min", LEAST_COSINE, -1.0, 1.0)
        found.append(Cosine(expected("cosine"), least))
    if "argmax" in members:
        classes = _integers(members.path("argmax"), members.take("argmax"))
        found.append(Classes(tuple(frozenset({each}) for each in classes)))
    if "top" in members:
        found.append(Classes(_sets(members.path("top"), members.take("top"))))
    return found


def _tolerances(members: StrictObject, datatype: Datatype) -> tuple[float, float]:
    rtol, atol = TOLERANCES.get(datatype, EXACT)
    most = float(np.finfo(np.float64).max)
    return members.number("rtol", rtol, 0.0, most), members.number("atol", atol, 0.0, most)


def _sets(path: str, value: Any) -> tuple[frozenset[int], ...]:
    if not isinstance(value, list) or not value:
        refuse(path, f"is {shown(value)}, expected a list of classes for each row")
    return tuple(frozenset(_integers(f"{path}[{row}]", each)) for row, each in enumerate(value))


def _integers(path: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or any(type(each) is not int for each in value):
        refuse(path, f"is {shown(value)}, expected a list of classes")
    return value
