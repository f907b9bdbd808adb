"""Estimators that are trained once, and the program of the worker in the process of the tests."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import skops.io
from sklearn.cluster import KMeans
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from tests.backends.python.worker.gateway import WORKER
from tests.serving import ROOT

ROWS = np.random.default_rng(0).random((60, 4))
CLASSES = (ROWS[:, 0] > 0.5).astype(int) + (ROWS[:, 1] > 0.8)
WORDS = np.array(["nö", "maybe", "yes"])[CLASSES]
TEXTS = ["a good day", "bad", "good good", "a bad bad day"]
FEATURES = ["age", "height", "income", "weight"]


@dataclass(frozen=True)
class OwnScaler:
    """An own type: scikit-learn calls it as an estimator, and skops does not trust it."""

    factor: float = 2.0

    def transform(self, rows: Any) -> Any:
        return np.asarray(rows) * self.factor


def named(estimator: Any) -> Any:
    """The estimator as if it had been fitted with a data frame of FEATURES."""
    estimator.feature_names_in_ = np.array(FEATURES, dtype=object)
    return estimator


@pytest.fixture(scope="session")
def estimators() -> Mapping[str, Any]:
    """Fitted estimators by name."""
    logistic = make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression())
    forest = RandomForestClassifier(5, random_state=0)
    return {
        "logistic": logistic.fit(ROWS, WORDS),
        "binary": LogisticRegression().fit(ROWS, ROWS[:, 0] > 0.5),
        "forest": forest.fit(ROWS, CLASSES),
        "regressor": RandomForestRegressor(5, random_state=0).fit(ROWS, ROWS[:, 0] * 3),
        "boosting": HistGradientBoostingClassifier(max_iter=5).fit(ROWS, WORDS),
        "neighbours": KNeighborsClassifier(algorithm="kd_tree").fit(ROWS, CLASSES),
        "scaler": StandardScaler().fit(ROWS),
        "clusters": KMeans(3, n_init=1, random_state=0).fit(ROWS),
        "targets": LinearRegression().fit(ROWS, ROWS[:, :2]),
        "outliers": IsolationForest(n_estimators=5, random_state=0).fit(ROWS),
        "texts": make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(TEXTS, [1, 0, 1, 0]),
        "encoder": OneHotEncoder().fit(WORDS.reshape(-1, 1)),
        "columns": named(RandomForestClassifier(5, random_state=0).fit(ROWS, CLASSES)),
    }


@dataclass(frozen=True)
class Program:
    """The modules of the worker's program, and what they make of an estimator."""

    api: Any
    batch: Any
    contract: Any
    estimator_file: Any

    def completed(self, estimator: Any, **config: Any) -> dict[str, Any]:
        """The completed config."""
        made = self._config({"name": "m", **config})
        self.contract.complete(made, estimator)
        return made.as_dict()

    def opened(self, estimator: Any, **config: Any) -> Any:
        """The contract of a model with the completed config."""
        return self.contract.contract(self.completed(estimator, **config), estimator)

    def answers(self, contract: Any, *requests: Any) -> list[Any]:
        """The outputs of each request by name, or the text of its error."""
        return [_read(each) for each in self.batch.answer(contract, list(requests))]

    def request(self, outputs: Sequence[str] = ("predict",), /, **inputs: Any) -> Any:
        """A request for arrays; texts become bytes, as on the wire."""
        tensors = [self.api.Tensor(name, _bytes(each)) for name, each in inputs.items()]
        return self.api.InferenceRequest(
            inputs=tensors, requested_output_names=list(outputs), model_name="m"
        )

    def saved(self, folder: Path, parameter: str = "", name: str = "model.skops") -> Any:
        """The estimator in a file of a version folder."""
        config = {"name": "m", "default_model_filename": name}
        if parameter:
            config["parameters"] = {"trusted_types": {"string_value": parameter}}
        return self.estimator_file.EstimatorFile(config, folder).load()

    def _config(self, config: Mapping[str, Any]) -> Any:
        return importlib.import_module("sluice_worker.model_config").ModelConfig(json.dumps(config))


def _bytes(found: Any) -> Any:
    if found.dtype != object:
        return found
    encoded = [each if isinstance(each, bytes) else each.encode() for each in found.ravel()]
    made = np.empty(len(encoded), dtype=object)
    made[:] = encoded
    return made.reshape(found.shape)


def _read(response: Any) -> Any:
    if response.has_error():
        return response.error().message()
    return {each.name(): each.as_numpy() for each in response.output_tensors()}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program, found as in a worker."""
    for folder in (WORKER, ROOT / "backends" / "sklearn" / "worker"):
        monkeypatch.syspath_prepend(str(folder))
    api = importlib.import_module("triton_python_backend_utils")
    names = ("batch", "contract", "estimator_file")
    return Program(api, *(importlib.import_module(f"sluice_sklearn.{name}") for name in names))


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a model's file by its suffix, and returns the version folder."""

    def write(estimator: Any, name: str = "model.skops", model: str = "m") -> Path:
        folder = tmp_path / model / "1"
        folder.mkdir(parents=True, exist_ok=True)
        write_estimator(estimator, folder / name)
        return folder

    return write


def write_estimator(estimator: Any, file: Path) -> None:
    """Save an estimator by skops or by joblib."""
    if file.suffix == ".skops":
        skops.io.dump(estimator, file)
    else:
        joblib.dump(estimator, file)
