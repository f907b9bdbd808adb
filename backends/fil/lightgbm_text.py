"""Checks of LightGBM's text of trees: with a damaged one the library ends the process."""

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

TREE_SIZES = re.compile(rb"^tree_sizes=([\d ]+)\r?$", re.MULTILINE)
HEAD_NUMBER = re.compile(rb"^(\w+)=(\d{1,9})\r?$", re.MULTILINE)
NO_OBJECTIVE = re.compile(rb"^objective=\s*$", re.MULTILINE)
FEATURES = b"max_feature_idx"
POSITIVE = (b"num_class", b"num_tree_per_iteration")
FIRST_TREE = b"\nTree=0\n"
TREES_END = b"end of trees"
PARAMETERS, PARAMETERS_END = b"\nparameters:", b"\nend of parameters"
CATEGORICAL = 1
"""The bit of a `decision_type` whose threshold is the number of a set of categories."""
BITS = 32
"""Categories of one number in `cat_threshold`."""
LARGEST = 2**31


def problem_of_lightgbm(data: bytes) -> str:
    """A reason why the library cannot read this text, empty if there is none."""
    found = TREE_SIZES.search(data)
    sizes = [int(size) for size in found[1].split()] if found else []
    begin, end = data.find(FIRST_TREE) + 1, data.find(TREES_END)
    cut_off = PARAMETERS in data and PARAMETERS_END not in data
    if not sizes or cut_off or end - begin != sum(sizes):
        return "cut short: expected trees of LightGBM of the sizes in 'tree_sizes'"
    numbers = dict(HEAD_NUMBER.findall(data, 0, begin))
    for name in (FEATURES, *POSITIVE):
        if name not in numbers or (name in POSITIVE and not int(numbers[name])):
            return f"damaged: expected a number as '{name.decode()}'"
    if NO_OBJECTIVE.search(data, 0, begin):
        return "damaged: expected a name as 'objective'"
    for index, size in enumerate(sizes):
        try:
            _Tree(data[begin : begin + size], int(numbers[FEATURES]) + 1).check()
        except (ValueError, OverflowError) as error:
            return f"damaged: tree {index} has {error}"
        begin += size
    return ""


class _Tree:
    """The fields of one tree, by name; ValueError names the one that is wrong."""

    def __init__(self, text: bytes, features: int) -> None:
        lines = (line.partition(b"=") for line in text.split(b"\n"))
        self._fields: Mapping[bytes, bytes] = {name: value for name, _, value in lines}
        self._features = features

    def check(self) -> None:
        leaves, sets = self._number("num_leaves", 1), self._number("num_cat", 0)
        self._floats("leaf_value", leaves)
        self._optional_floats("shrinkage", 1)
        for name in ("leaf_weight", "leaf_count"):
            self._optional_floats(name, leaves)
        for name in ("split_gain", "internal_value", "internal_weight", "internal_count"):
            self._optional_floats(name, leaves - 1)
        if leaves > 1:
            self._check_splits(leaves, sets)
        if self._number("is_linear", 0, default=0):
            self._check_linear(leaves)

    def _check_splits(self, leaves: int, sets: int) -> None:
        splits = leaves - 1
        self._integers("split_feature", splits, 0, self._features - 1)
        kinds = self._integers("decision_type", splits, -128, 127)
        thresholds = self._floats("threshold", splits)
        self._check_children(leaves)
        chosen = thresholds[(kinds & CATEGORICAL) != 0]
        if sets:
            bounds = self._integers("cat_boundaries", sets + 1, 0, LARGEST)
            if bounds[0] != 0 or (np.diff(bounds) < 0).any():
                raise ValueError("no ascending 'cat_boundaries'")
            self._integers("cat_threshold", int(bounds[-1]), 0, 2**BITS - 1)
        if not ((chosen >= 0) & (chosen < sets)).all():
            raise ValueError(f"a 'threshold' of another set of categories than its {sets}")

    def _check_children(self, leaves: int) -> None:
        """Each split but the first, and each leaf, must be the child of one split above it."""
        splits = leaves - 1
        left = self._integers("left_child", splits, -leaves, splits - 1)
        right = self._integers("right_child", splits, -leaves, splits - 1)
        below = np.concatenate([left, right])
        expected = [*range(-leaves, 0), *range(1, splits)]
        parents = np.tile(np.arange(splits), 2)
        if sorted(below) != expected or (below[below >= 0] <= parents[below >= 0]).any():
            raise ValueError("a 'left_child' or 'right_child' that does not make a tree")

    def _check_linear(self, leaves: int) -> None:
        self._floats("leaf_const", leaves)
        count = int(self._integers("num_features", leaves, 0, self._features).sum())
        self._integers("leaf_features", count, 0, self._features - 1)
        self._floats("leaf_coeff", count)

    def _number(self, name: str, least: int, default: int | None = None) -> int:
        if default is not None and name.encode() not in self._fields:
            return default
        (found,) = self._integers(name, 1, least, LARGEST)
        return int(found)

    def _integers(self, name: str, count: int, least: int, most: int) -> Integers:
        found = self._values(name, count)
        try:
            numbers = np.array(found, np.int64)
        except ValueError:
            raise ValueError(f"'{name}' that are no whole numbers") from None
        if count and not (numbers.min() >= least and numbers.max() <= most):
            raise ValueError(f"'{name}' outside of {least} to {most}")
        return numbers

    def _floats(self, name: str, count: int) -> npt.NDArray[np.float64]:
        found = self._values(name, count)
        try:
            return np.array(found, np.float64)
        except ValueError:
            raise ValueError(f"'{name}' that are no numbers") from None

    def _optional_floats(self, name: str, count: int) -> None:
        found = self._fields.get(name.encode())
        if found is not None and (found.strip() or count > 1):
            self._floats(name, count)

    def _values(self, name: str, count: int) -> list[bytes]:
        found = self._fields.get(name.encode(), b"").split()
        if len(found) != count:
            raise ValueError(f"{len(found)} values of '{name}', expected {count}")
        return found
