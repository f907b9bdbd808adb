"""Answers of forests are the numbers of their libraries, in Triton's shapes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import xgboost

from backends.fil.instance import FilInstance
from gateway.config import ModelConfig, ModelInput, TensorReshape
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype
from tests.backends.fil.conftest import (
    HOLES,
    ROWS,
    checkpoint_of,
    config,
    json_of,
    lgb,
    output,
    text_of,
    ubj_of,
    xgb,
)
from tests.tensor_backends import Load, answers, ask, floats, request

SHAP = output(18, name="treeshap_output")


async def predicted(instance: Any, rows: Any = HOLES, name: str = "output__0") -> Any:
    """The output for rows of one request, as an array."""
    (found,) = await ask(instance, floats(input__0=rows))
    return np.array(found[name], np.float32)


def softprob(booster: Any) -> Any:
    """The probabilities of a forest of multi:softmax."""
    copy = xgboost.Booster(model_file=bytearray(json_of(booster)))
    copy.set_param({"objective": "multi:softprob"})
    return copy.inplace_predict(HOLES)


# One forest per kind of objective.


@pytest.mark.parametrize("objective", ["reg:squarederror", "count:poisson"])
async def test_a_regressor_answers_the_transformed_prediction(load: Load, objective: str) -> None:
    booster = xgb(objective, "values")
    found = await predicted(await load({"xgboost.json": json_of(booster)}))
    assert np.array_equal(found, booster.inplace_predict(HOLES))


async def test_a_regressor_of_lightgbm(load: Load) -> None:
    booster = lgb("regression", "values")
    found = await predicted(await load({"model.txt": text_of(booster)}))
    assert np.array_equal(found, booster.predict(HOLES).astype(np.float32))


async def test_a_binary_classifier_answers_one_above_the_threshold(load: Load) -> None:
    booster = xgb("binary:logistic")
    p = booster.inplace_predict(HOLES)
    found = await predicted(await load({"xgboost.json": json_of(booster)}))
    assert np.array_equal(found, p > 0.5)
    found = await predicted(await load(None, config(threshold="0.8")))
    assert np.array_equal(found, p > np.float32(0.8))
    assert 0 < found.sum() < (p > 0.5).sum()
    # A probability that is the threshold is not above it.
    first = await predicted(await load(None, config(threshold=repr(float(p[0])))), HOLES[:1])
    assert first.tolist() == [0]


async def test_binary_probabilities_have_one_column_or_two(load: Load) -> None:
    booster = xgb("binary:logistic")
    p = booster.inplace_predict(HOLES)
    wants = config(predict_proba="true")
    found = await predicted(await load({"xgboost.json": json_of(booster)}, wants))
    assert np.array_equal(found, np.stack([1 - p, p], axis=1))
    found = await predicted(await load(None, replace(wants, output=(output(1),))))
    assert np.array_equal(found, p)


@pytest.mark.parametrize("objective", ["multi:softprob", "multi:softmax"])
async def test_several_classes_are_a_number_or_probabilities(load: Load, objective: str) -> None:
    booster = xgb(objective, "classes")
    p = softprob(booster)
    found = await predicted(await load({"xgboost.json": json_of(booster)}))
    assert np.array_equal(found, p.argmax(axis=1))
    assert len(set(found.tolist())) == 3
    found = await predicted(await load(None, config(predict_proba="true")))
    assert np.array_equal(found, p)


@pytest.mark.parametrize(("objective", "labels"), [("binary", "binary"), ("multiclass", "classes")])
async def test_classifiers_of_lightgbm(load: Load, objective: str, labels: str) -> None:
    booster = lgb(objective, labels)
    p = booster.predict(HOLES).astype(np.float32)
    found = await predicted(await load({"model.txt": text_of(booster)}))
    assert np.array_equal(found, p > 0.5 if p.ndim == 1 else p.argmax(axis=1))
    found = await predicted(await load(None, config(predict_proba="true")))
    assert np.array_equal(found, np.stack([1 - p, p], axis=1) if p.ndim == 1 else p)


async def test_a_checkpoint_of_treelite_is_within_a_rounding_of_xgboost(load: Load) -> None:
    booster = xgb("multi:softprob", "classes")
    wants = config(model_type="treelite_checkpoint", predict_proba="true")
    found = await predicted(await load({"checkpoint.tl": checkpoint_of(booster)}, wants))
    np.testing.assert_allclose(found, booster.inplace_predict(HOLES), atol=2e-7)
    found = await predicted(await load(None))
    assert np.array_equal(found, booster.inplace_predict(HOLES).argmax(axis=1))


async def test_a_classifier_may_be_served_as_a_regressor(load: Load) -> None:
    booster = xgb("binary:logistic")
    found = await predicted(
        await load({"xgboost.ubj": ubj_of(booster)}, config(is_classifier="false"))
    )
    assert np.array_equal(found, booster.inplace_predict(HOLES))
    booster = xgb("reg:squarederror", "values")
    asked = config(output_class="true", threshold="4")
    found = await predicted(await load({"xgboost.ubj": ubj_of(booster)}, asked))
    assert np.array_equal(found, booster.inplace_predict(HOLES) > 4)


# Contributions of features.


@pytest.mark.parametrize(
    ("file", "made", "train", "dims"),
    [
        ("xgboost.json", json_of, partial(xgb, "binary:logistic"), 6),
        ("xgboost.json", json_of, partial(xgb, "multi:softmax", "classes"), 18),
        ("model.txt", text_of, partial(lgb, "regression", "values"), 6),
        ("model.txt", text_of, partial(lgb, "multiclass", "classes"), 18),
    ],
)
async def test_contributions_are_those_of_the_library(
    load: Load, file: str, made: Any, train: Callable[[], Any], dims: int
) -> None:
    booster = train()
    shap = output(dims, name="treeshap_output")
    asked = replace(config(), output=(output(1), shap), max_batch_size=400)
    found = await predicted(await load({file: made(booster)}, asked), HOLES, "treeshap_output")
    rows = HOLES if file == "model.txt" else xgboost.DMatrix(HOLES)
    name = "pred_contrib" if file == "model.txt" else "pred_contribs"
    expected = booster.predict(rows, **{name: True}).reshape(len(HOLES), -1)
    assert found.shape == (len(HOLES), dims)
    assert np.array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("outputs", [(output(1),), (output(1), output(6, name="treeshap_output"))])
async def test_a_model_with_contributions_never_runs_on_the_event_loop(
    load: Load, outputs: Any
) -> None:
    asked = replace(config(), output=outputs, max_batch_size=4)
    instance = await load({"xgboost.json": json_of(xgb("binary:logistic"))}, asked)
    assert isinstance(instance, FilInstance)
    assert instance.steady is (len(outputs) == 1)


async def test_contributions_of_a_checkpoint_are_refused_at_the_load(load: Load) -> None:
    asked = replace(config(), output=(output(1), SHAP), max_batch_size=4)
    with pytest.raises(InferenceError, match="'treeshap_output' is computed for files of") as found:
        await load({"checkpoint.tl": checkpoint_of(xgb("multi:softprob", "classes"))}, asked)
    assert found.value.code is Code.UNSUPPORTED


# Batches and shapes.


@pytest.mark.parametrize(
    "files",
    [
        {"xgboost.json": json_of(xgb("multi:softprob", "classes"))},
        {"model.txt": text_of(lgb("multiclass", "classes"))},
        {"checkpoint.tl": checkpoint_of(xgb("multi:softprob", "classes"))},
    ],
    ids=str,
)
async def test_an_answer_does_not_depend_on_its_batch(load: Load, files: Any) -> None:
    instance = await load(files, config(predict_proba="true", cpu_nthread="2"))
    whole = await ask(instance, *(floats(input__0=HOLES[at : at + 1]) for at in range(64)))
    for at, found in enumerate(whole):
        assert (await ask(instance, floats(input__0=HOLES[at : at + 1]))) == [found]
    assert (await predicted(instance)).tolist()[:64] == [each["output__0"][0] for each in whole]


async def test_dims_of_one_are_squeezed_unless_the_config_reshapes(load: Load) -> None:
    booster = xgb("reg:squarederror", "values")
    instance = await load({"xgboost.json": json_of(booster)})
    for shape, asked in (((2,), None), ((2, 1), TensorReshape())):
        if asked is not None:
            kept = replace(output(1), reshape=asked)
            instance = await load(None, replace(config(), output=(kept,), max_batch_size=4))
        ((_, found),) = await answers(instance, floats(input__0=ROWS[:2]))
        assert found.outputs[0].shape == shape  # type: ignore[union-attr]


async def test_a_model_without_batches_has_its_rows_in_its_dims(load: Load) -> None:
    booster = xgb("reg:squarederror", "values")
    asked = ModelConfig(
        backend="fil",
        input=(ModelInput(name="input__0", data_type=DataType.TYPE_FP32, dims=(-1, 5)),),
        output=(output(-1, 1),),
    )
    instance = await load({"xgboost.json": json_of(booster)}, asked)
    assert np.array_equal(await predicted(instance), booster.inplace_predict(HOLES))


# Bad input.


@pytest.mark.parametrize("columns", [0, 4, 6])
async def test_rows_of_another_width_are_refused_before_the_library(
    load: Load, columns: int
) -> None:
    instance = await load({"checkpoint.tl": checkpoint_of(xgb("binary:logistic"))})
    rows = np.zeros((2, columns), np.float32)
    with pytest.raises(InferenceError) as refused:
        await ask(instance, floats(input__0=rows))
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == (
        f"input 'input__0' of model 'm' has datatype float32 and shape [2,{columns}], expected "
        "float32 and [-1,5]"
    )


async def test_another_datatype_is_refused_before_the_library(load: Load) -> None:
    instance = await load({"xgboost.json": json_of(xgb("binary:logistic"))})
    rows = np.zeros((2, 5), np.float64)
    with pytest.raises(InferenceError, match="has datatype float64"):
        await ask(instance, request({"input__0": rows}, Datatype.FP64))


async def test_rows_of_nothing_but_missing_values_and_infinities(load: Load) -> None:
    instance = await load({"model.txt": text_of(lgb("binary"))}, config(predict_proba="true"))
    found = await predicted(instance, np.full((2, 5), np.nan))
    assert np.isfinite(found).all()
    found = await predicted(instance, np.full((2, 5), np.inf))
    assert np.isfinite(found).all()
