"""The verdicts on parameters are those of the backends, in their words, and of their pages."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.fil.model_file import model_type
from backends.fil.parameters import REMOVED, FilParameters
from backends.openvino.parameters import OpenVinoParameters
from backends.openvino_genai.backend import OpenVinoGenAiBackend
from backends.python.loading import WorkerLimits
from backends.tensorflow.parameters import TensorFlowParameters
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.models.supported_fields import HONOURED, PARAMETERS, FieldSupport, FieldVerdict
from gateway.models.supported_parameters import (
    BACKENDS,
    OF_ALL_MODELS,
    WORKER,
    parameter_support,
)

ROOT = Path(__file__).parents[3]
VALUES = (
    "",
    "true",
    "True",
    "false",
    "yes",
    "YES",
    "NO",
    "on",
    "maybe",
    "auto",
    "numa",
    "latency",
    "THROUGHPUT",
    "lightgbm",
    "catboost",
    " 2 ",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1024",
    "1025",
    "99999999999",
)
PATHS = ("CPU_EXTENSION_PATH", "EXECUTION_ENV_PATH")
"""Parameters whose values are looked for on disk."""


def read_forest(config: ModelConfig) -> None:
    model_type(config)
    FilParameters.read(config)


def read_genai(config: ModelConfig) -> None:
    OpenVinoGenAiBackend().complete(config, Path())
    WorkerLimits.read(config)


READERS: dict[str, Callable[[ModelConfig], Any]] = {
    "fil": read_forest,
    "openvino": lambda config: OpenVinoParameters.read(config, Path("m/1")),
    "openvino_genai": read_genai,
    "sklearn": WorkerLimits.read,
    "tensorflow": lambda config: TensorFlowParameters.read(config, {}),
}


def refusal(backend: str, key: str, value: str) -> str:
    """The text with which the backend refuses a value, "" if it reads it."""
    try:
        READERS[backend](ModelConfig(name="m", backend=backend, parameters={key: value}))
    except InferenceError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("backend", "key"), [(name, key) for name, known in BACKENDS.items() for key in known]
)
def test_a_value_is_refused_in_the_words_of_the_backend(backend: str, key: str) -> None:
    for value in VALUES if key not in PATHS else ("",):
        found = parameter_support(backend, key, value, "m")
        refused = found.why if found.verdict is FieldVerdict.REFUSED else ""
        assert refused == refusal(backend, key, value), value


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_parameter_that_a_page_names_has_a_verdict(backend: str) -> None:
    page = (ROOT / "backends" / backend / "README.md").read_text()
    _, _, rows = page.partition("\n## Parameters\n")
    rows = rows.partition("\n## ")[0]
    first = (row.split("|")[1] for row in rows.splitlines() if row.startswith("| `"))
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    without_table = {"sklearn": {"trusted_types"}, "openvino_genai": set(BACKENDS[backend])}
    assert (named or without_table[backend]) | WORKER.keys() == BACKENDS[backend].keys() | (
        WORKER.keys()
    )


def test_worker_parameters_are_those_of_the_python_backend() -> None:
    page = (ROOT / "backends/python/README.md").read_text()
    assert [key for key in WORKER if f"`{key}`" not in page] == []


@pytest.mark.parametrize("key", OF_ALL_MODELS)
def test_a_parameter_of_all_models_is_read_by_the_gateway(key: str) -> None:
    readers = [
        path
        for path in (ROOT / "gateway").rglob("*.py")
        if path.stem != "supported_parameters" and f'"{key}"' in path.read_text()
    ]
    assert readers
    assert parameter_support("fil", key, "1", "m") is HONOURED


@pytest.mark.parametrize(
    ("backend", "key", "why"),
    [
        (
            "openvino",
            "num_stream",
            "no effect: backend 'openvino' has no such parameter; did you mean 'NUM_STREAMS'?",
        ),
        (
            "fil",
            "Threshold",
            "no effect: backend 'fil' has no such parameter; did you mean 'threshold'?",
        ),
        ("tensorflow", "colour", "no effect: backend 'tensorflow' has no such parameter"),
        ("sklearn", "allow-pickle", PARAMETERS["allow-pickle"].why),
    ],
)
def test_an_unknown_parameter_has_no_effect(backend: str, key: str, why: str) -> None:
    found = parameter_support(backend, key, "x", "m")
    assert found == FieldSupport(FieldVerdict.IGNORED, why)


def test_a_removed_parameter_of_forests_has_no_effect() -> None:
    for key in REMOVED:
        found = parameter_support("fil", key, "x", "m")
        assert found.verdict is FieldVerdict.IGNORED
        assert found.why == "Triton's backend has removed it in 25.09"


def test_backends_without_a_table_may_read_any_key() -> None:
    assert parameter_support("python", "any", "x", "m") is HONOURED
    assert parameter_support("", "any", "x", "m") is HONOURED
    ignored = parameter_support("python", "TRITON_BATCH_STRATEGY_PATH", "x", "m")
    assert ignored.verdict is FieldVerdict.IGNORED
