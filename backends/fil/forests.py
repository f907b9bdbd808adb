"""Forests of three libraries."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import lightgbm
import numpy as np
import numpy.typing as npt
import treelite
import xgboost

from gateway.errors import Code, InferenceError

Array = npt.NDArray[Any]

XGBOOST_CLASSIFIERS = ("binary:", "multi:")
LIGHTGBM_CLASSIFIERS = ("binary", "multiclass", "multiclassova")
BLOCK = 64
"""The rows that one thread predicts alone; XGBoost gives no less to a thread."""
TREELITE_CLASSIFIERS = (0, 2)
"""Numbers of treelite's kBinaryClf and kMultiClf."""


class Forest(Protocol):
    """A forest in memory; its predictions let the interpreter lock go.

    `classes` is the number of predictions per row: 1 for binary classes. `explains`: it has
    contributions. Rows are FP32, C-contiguous, with `features` columns; NaN is a missing value.
    """

    features: int
    classes: int
    classifies: bool
    explains: bool

    def predict(self, rows: Array) -> Array:
        """The predictions of each row, in FP32."""

    def contributions(self, rows: Array) -> Array:
        """For each class the contribution of each feature to the margin, then the bias."""


class XgboostForest:
    """A forest of XGBoost, from JSON or UBJSON."""

    explains = True

    def __init__(self, data: bytes, threads: int) -> None:
        self._threads = threads
        self._set = threads
        self._booster = xgboost.Booster({"nthread": threads}, model_file=bytearray(data))
        learner = json.loads(self._booster.save_config())["learner"]
        if learner["gradient_booster"]["name"] == "gblinear":
            raise InferenceError(
                Code.UNSUPPORTED,
                "booster gblinear is a linear model; expected a forest, of booster gbtree or dart",
            )
        sizes, objective = learner["learner_model_param"], learner["objective"]["name"]
        require_one_target(int(sizes["num_target"]))
        self.features = self._booster.num_features()
        self.classes = max(1, int(sizes["num_class"]))
        self.classifies = objective.startswith(XGBOOST_CLASSIFIERS)
        if objective == "multi:softmax":  # it would predict the class instead of probabilities
            self._booster.set_param({"objective": "multi:softprob"})

    def predict(self, rows: Array) -> Array:
        self._use_threads(len(rows))
        found: Array = self._booster.inplace_predict(rows, validate_features=False)
        return found.reshape(len(rows), self.classes)

    def _use_threads(self, rows: int) -> None:
        """One thread for one block, or all: a change costs half a prediction of a row."""
        threads = 1 if rows <= BLOCK else self._threads
        if threads != self._set:
            self._set = threads
            self._booster.set_param({"nthread": threads})

    def contributions(self, rows: Array) -> Array:
        matrix = xgboost.DMatrix(
            rows,
            nthread=self._threads,
            feature_types=self._booster.feature_types,
            enable_categorical=True,
        )
        found: Array = self._booster.predict(matrix, pred_contribs=True, validate_features=False)
        return found.reshape(len(rows), -1)


class LightgbmForest:
    """A forest of LightGBM, from its text."""

    explains = True

    def __init__(self, data: bytes, threads: int) -> None:
        self._threads = threads
        self._booster = lightgbm.Booster(model_str=data.decode())
        objective = self._booster.dump_model(num_iteration=1).get("objective", "").split(" ")[0]
        self.features = self._booster.num_feature()
        self.classes = self._booster.num_model_per_iteration()
        self.classifies = objective in LIGHTGBM_CLASSIFIERS

    def predict(self, rows: Array) -> Array:
        threads = _threads_for(rows, self._threads)
        found: Array = self._booster.predict(rows, num_threads=threads)
        return found.astype(np.float32).reshape(len(rows), self.classes)

    def contributions(self, rows: Array) -> Array:
        found: Array = self._booster.predict(rows, pred_contrib=True, num_threads=self._threads)
        return found.astype(np.float32).reshape(len(rows), -1)


class TreeliteForest:
    """A forest of treelite: a checkpoint, or an old binary of XGBoost."""

    explains = False

    def __init__(self, model: treelite.Model, threads: int) -> None:
        self._threads = threads
        self._model = model
        header = model.get_header_accessor()
        require_one_target(_first(header.get_field("num_target")))
        self.features = model.num_feature
        self.classes = _first(header.get_field("num_class"))
        self.classifies = _first(header.get_field("task_type")) in TREELITE_CLASSIFIERS

    def predict(self, rows: Array) -> Array:
        threads = _threads_for(rows, self._threads)
        found: Array = treelite.gtil.predict(self._model, rows, nthread=threads)
        return found.astype(np.float32).reshape(len(rows), self.classes)

    def contributions(self, rows: Array) -> Array:
        raise InferenceError(Code.UNSUPPORTED, "treelite has no contributions of features")


def require_one_target(targets: int) -> None:
    """Raise InferenceError UNKNOWN for a forest of several targets, as Triton."""
    if targets > 1:
        raise InferenceError(Code.UNKNOWN, "Multi-target model not supported")


def _threads_for(rows: Array, most: int) -> int:
    """One thread per block: on a busy machine threads wait for each other for milliseconds."""
    return max(1, min(most, len(rows) // BLOCK))


def _first(numbers: Sequence[Any]) -> int:
    return int(numbers[0])
