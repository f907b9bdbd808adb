"""Forests that the tests train once, and loads of them by the backend."""

from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import treelite
import xgboost

from backends.fil.backend import FilBackend
from gateway.config import ModelConfig, ModelOutput
from gateway.config.data_type import DataType
from tests.tensor_backends import Load, loading, version_folder

FEATURES = 5
ROWS = np.random.default_rng(7).random((300, FEATURES), dtype=np.float32)
HOLES = np.where(ROWS > 0.9, np.float32(np.nan), ROWS)
"""Rows with missing values."""
LABELS = {
    "binary": (ROWS[:, 0] + ROWS[:, 1] > 1).astype(int),
    "classes": (ROWS[:, 0] * 3).astype(int),
    "values": ROWS[:, 0] * 10 + ROWS[:, 1],
    "targets": ROWS[:, :2],
}
CLASSES = {"num_class": 3}


@cache
def xgb(objective: str, labels: str = "binary", booster: str = "gbtree") -> Any:
    """A booster of XGBoost with a few trees."""
    more = CLASSES if objective.startswith("multi") else {}
    trees = {} if booster == "gblinear" else {"max_depth": 3}
    parameters = {"objective": objective, "booster": booster, "nthread": 1, **trees, **more}
    return xgboost.train(parameters, xgboost.DMatrix(HOLES, LABELS[labels]), 5)


@cache
def lgb(objective: str, labels: str = "binary") -> Any:
    """A booster of LightGBM with a few trees."""
    more = CLASSES if objective.startswith("multi") else {}
    parameters = {"objective": objective, "num_leaves": 7, "min_data_in_leaf": 5, **more}
    quiet = {"verbose": -1, "num_threads": 1}
    return lightgbm.train({**parameters, **quiet}, lightgbm.Dataset(HOLES, LABELS[labels]), 5)


@pytest.fixture(scope="session", autouse=True)
def released_boosters() -> Iterator[None]:
    """Boosters end before Python does: later, their destructor fails without its library."""
    yield
    xgb.cache_clear()
    lgb.cache_clear()


def json_of(booster: Any) -> bytes:
    return bytes(booster.save_raw("json"))


def ubj_of(booster: Any) -> bytes:
    return bytes(booster.save_raw("ubj"))


def text_of(booster: Any) -> bytes:
    return bytes(booster.model_to_string().encode())


def checkpoint_of(booster: Any) -> bytes:
    """A checkpoint of treelite, made of a booster of XGBoost."""
    return bytes(treelite.frontend.from_xgboost(booster).serialize_bytes())


def save(files: Mapping[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def config(**parameters: str) -> ModelConfig:
    """A config of nothing but parameters."""
    return ModelConfig(name="m", backend="fil", parameters=parameters)


def output(*dims: int, name: str = "output__0") -> ModelOutput:
    return ModelOutput(name=name, data_type=DataType.TYPE_FP32, dims=dims)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    return version_folder(tmp_path)


@pytest.fixture
async def load(folder: Path) -> AsyncIterator[Load]:
    """Write files, complete a config, load the model; closed when the test ends."""
    async with loading(folder, FilBackend, save) as make:
        yield make
