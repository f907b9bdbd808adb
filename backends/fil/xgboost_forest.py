"""Forests of XGBoost."""

import json

import xgboost

from backends.fil.forests import BLOCK, Array, Errors, ForestLibrary, require_one_target
from gateway.errors import Code, InferenceError

CLASSIFIERS = ("binary:", "multi:")


class XgboostForest:
    """A forest of XGBoost, from JSON or UBJSON."""

    explains = True
    errors: Errors = (xgboost.core.XGBoostError,)

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
        self.classifies = objective.startswith(CLASSIFIERS)
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


XGBOOST = ForestLibrary(
    f"XGBoost {xgboost.__version__}",
    XgboostForest.errors,
    lambda file, data, threads: XgboostForest(data, threads),
)
