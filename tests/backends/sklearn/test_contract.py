"""Configs are completed from an estimator, and checked against it."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.backends.sklearn.conftest import FEATURES, Program

Tensors = list[tuple[str, str, list[int]]]
PROBABILITIES = ("predict_proba", "TYPE_FP64", [3])


def tensors(config: Mapping[str, Any], side: str) -> Tensors:
    return [(each["name"], each["data_type"], each["dims"]) for each in config[side]]


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        (
            "logistic",
            [
                ("predict", "TYPE_STRING", [1]),
                PROBABILITIES,
                ("decision_function", "TYPE_FP64", [3]),
            ],
        ),
        (
            "binary",
            [
                ("predict", "TYPE_BOOL", [1]),
                ("predict_proba", "TYPE_FP64", [2]),
                ("decision_function", "TYPE_FP64", [1]),
            ],
        ),
        ("forest", [("predict", "TYPE_INT64", [1]), PROBABILITIES]),
        ("regressor", [("predict", "TYPE_FP64", [1])]),
        ("scaler", [("transform", "TYPE_FP64", [4])]),
        ("clusters", [("predict", "TYPE_INT32", [1]), ("transform", "TYPE_FP64", [3])]),
        ("targets", [("predict", "TYPE_FP64", [2])]),
        ("outliers", [("predict", "TYPE_INT64", [1]), ("decision_function", "TYPE_FP64", [1])]),
    ],
)
def test_outputs_are_the_methods_of_an_estimator(
    program: Program, estimators: Mapping[str, Any], name: str, outputs: Tensors
) -> None:
    config = program.completed(estimators[name], max_batch_size=8)
    assert tensors(config, "input") == [("X", "TYPE_FP64", [4])]
    assert tensors(config, "output") == outputs


def test_without_batching_dims_begin_with_the_rows(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    config = program.completed(estimators["forest"])
    assert tensors(config, "input") == [("X", "TYPE_FP64", [-1, 4])]
    assert tensors(config, "output") == [
        ("predict", "TYPE_INT64", [-1]),
        ("predict_proba", "TYPE_FP64", [-1, 3]),
    ]


def test_a_vectorizer_takes_texts(program: Program, estimators: Mapping[str, Any]) -> None:
    config = program.completed(estimators["texts"], max_batch_size=8)
    assert tensors(config, "input") == [("X", "TYPE_STRING", [1])]
    assert tensors(config, "output")[0] == ("predict", "TYPE_INT64", [1])


def test_an_estimator_that_refuses_zeros_has_outputs_of_any_size(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    config = program.completed(estimators["encoder"], max_batch_size=8)
    assert tensors(config, "output") == [("transform", "TYPE_FP64", [-1])]


def test_listed_tensors_keep_names_and_types(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    config = program.completed(
        estimators["logistic"],
        max_batch_size=8,
        input=[{"name": "rows", "data_type": "TYPE_FP32", "dims": [4]}],
        output=[{"name": "predict_proba", "data_type": "TYPE_FP32", "dims": [3]}],
    )
    assert tensors(config, "input") == [("rows", "TYPE_FP32", [4])]
    assert tensors(config, "output") == [("predict_proba", "TYPE_FP32", [3])]


def test_a_listed_column_asks_for_columns(program: Program, estimators: Mapping[str, Any]) -> None:
    income = {"name": "income", "data_type": "TYPE_FP32", "dims": [1]}
    config = program.completed(estimators["columns"], max_batch_size=8, input=[income])
    assert sorted(each["name"] for each in config["input"]) == FEATURES
    assert sorted({each["data_type"] for each in config["input"]}) == ["TYPE_FP32", "TYPE_FP64"]
    assert {tuple(each["dims"]) for each in config["input"]} == {(1,)}


def listed(*names: str, data_type: str = "TYPE_FP64", dims: Any = (4,)) -> list[dict[str, Any]]:
    return [{"name": each, "data_type": data_type, "dims": list(dims)} for each in names]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"input": listed("a", "b")}, "lists 2 inputs, expected one tensor of rows"),
        ({"input": listed("x", dims=[5])}, r"has dims \[5\] for input 'x', but the estimator"),
        ({"input": listed("x", dims=[2, 4])}, r"but the estimator expects \[4\]"),
        ({"input": listed("x", data_type="TYPE_BF16")}, "has TYPE_BF16 for input 'x'"),
        (
            {"output": listed("scores")},
            "unexpected inference output 'scores', allowed outputs are: predict, predict_proba",
        ),
        (
            {"output": listed("predict", dims=[1])},
            "'predict' is BYTES from the estimator, but the configuration expects FP64",
        ),
        (
            {"output": listed("predict_proba", data_type="TYPE_INT32", dims=[3])},
            "'predict_proba' is FP64 from the estimator, but the configuration expects INT32",
        ),
        (
            {"output": listed("predict_proba", dims=[2])},
            r"'predict_proba' has shape \[1, 3\] from the estimator, .* expects \[-1, 2\]",
        ),
    ],
)
def test_a_config_that_contradicts_the_estimator_is_refused(
    program: Program, estimators: Mapping[str, Any], config: Mapping[str, Any], text: str
) -> None:
    with pytest.raises(Exception, match=text) as refusal:
        program.opened(estimators["logistic"], max_batch_size=8, **config)
    assert type(refusal.value).__name__ == "BadAnswer"
    assert str(refusal.value).startswith("model 'm'")
    assert refusal.value.code == "INVALID_ARG"


def test_probabilities_of_several_targets_are_no_output(program: Program) -> None:
    class Several:
        """Classes of two targets."""

        n_features_in_ = 4

        def predict(self, rows: Any) -> Any:
            return np.zeros((len(rows), 2))

        def predict_proba(self, rows: Any) -> Any:
            return [np.zeros((len(rows), 3)), np.zeros((len(rows), 2))]

    config = program.completed(Several(), max_batch_size=8)
    assert tensors(config, "output") == [("predict", "TYPE_FP64", [2])]
    outputs = listed("predict_proba", dims=[-1])
    with pytest.raises(Exception, match="'predict_proba' is one array per target"):
        program.opened(Several(), max_batch_size=8, output=outputs)


def test_an_object_that_is_no_estimator_is_refused(program: Program) -> None:
    with pytest.raises(Exception, match="its file holds dict, expected a fitted estimator"):
        program.contract.refuse_no_estimator("m", {"a": 1})


@pytest.mark.parametrize(("counts", "threads"), [((), 8), ((1,), 8), ((2, 1), 2), ((9,), 1)])
def test_instances_share_the_cores(program: Program, counts: tuple[int, ...], threads: int) -> None:
    groups = [{"count": each, "kind": "KIND_CPU"} for each in counts]
    share = importlib.import_module("sluice_sklearn.model").share_of_cores
    assert share({"instance_group": groups}, 8) == threads
