"""Forests of treelite."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import treelite

from backends.fil.forests import Array, Errors, ForestLibrary, require_one_target, threads_for
from gateway.errors import Code, InferenceError

CLASSIFIERS = (0, 2)
"""Numbers of treelite's kBinaryClf and kMultiClf."""


class TreeliteForest:
    """A forest of treelite: a checkpoint, or an old binary of XGBoost."""

    explains = False
    errors: Errors = (treelite.TreeliteError,)

    def __init__(self, model: treelite.Model, threads: int) -> None:
        self._threads = threads
        self._model = model
        header = model.get_header_accessor()
        require_one_target(_first(header.get_field("num_target")))
        self.features = model.num_feature
        self.classes = _first(header.get_field("num_class"))
        self.classifies = _first(header.get_field("task_type")) in CLASSIFIERS

    def predict(self, rows: Array) -> Array:
        threads = threads_for(rows, self._threads)
        found: Array = treelite.gtil.predict(self._model, rows, nthread=threads)
        return found.astype(np.float32).reshape(len(rows), self.classes)

    def contributions(self, rows: Array) -> Array:
        raise InferenceError(Code.UNSUPPORTED, "treelite has no contributions of features")


def _first(numbers: Sequence[Any]) -> int:
    return int(numbers[0])


NAME = f"treelite {treelite.__version__}"
CHECKPOINTS = ForestLibrary(
    NAME,
    TreeliteForest.errors,
    lambda file, data, threads: TreeliteForest(treelite.Model.deserialize_bytes(data), threads),
)
OLD_BINARIES = ForestLibrary(
    NAME,
    TreeliteForest.errors,
    lambda file, data, threads: TreeliteForest(
        treelite.frontend.load_xgboost_model_legacy_binary(str(file)), threads
    ),
)
"""Those of XGBoost."""
