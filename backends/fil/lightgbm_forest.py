"""Forests of LightGBM, whose lines are lines of the log."""

import logging

import lightgbm
import numpy as np

from backends.fil.forests import Array, Errors, ForestLibrary, threads_for

CLASSIFIERS = ("binary", "multiclass", "multiclassova")

lightgbm.register_logger(logging.getLogger("sluice.fil"))


class LightgbmForest:
    """A forest of LightGBM, from its text."""

    explains = True
    errors: Errors = (lightgbm.basic.LightGBMError,)

    def __init__(self, data: bytes, threads: int) -> None:
        self._threads = threads
        self._booster = lightgbm.Booster(model_str=data.decode())
        objective = self._booster.dump_model(num_iteration=1).get("objective", "").split(" ")[0]
        self.features = self._booster.num_feature()
        self.classes = self._booster.num_model_per_iteration()
        self.classifies = objective in CLASSIFIERS

    def predict(self, rows: Array) -> Array:
        threads = threads_for(rows, self._threads)
        found: Array = self._booster.predict(rows, num_threads=threads)
        return found.astype(np.float32).reshape(len(rows), self.classes)

    def contributions(self, rows: Array) -> Array:
        found: Array = self._booster.predict(rows, pred_contrib=True, num_threads=self._threads)
        return found.astype(np.float32).reshape(len(rows), -1)


LIGHTGBM = ForestLibrary(
    f"LightGBM {lightgbm.__version__}",
    LightgbmForest.errors,
    lambda file, data, threads: LightgbmForest(data, threads),
)
