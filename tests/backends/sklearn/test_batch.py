"""Requests are answered as scikit-learn answers their rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.backends.sklearn.conftest import FEATURES, ROWS, TEXTS, WORDS, Program

METHODS = ("predict", "predict_proba", "decision_function", "transform")


def texts(found: Any) -> list[str]:
    return [each.decode() for each in found.ravel().tolist()]


@pytest.mark.parametrize(
    "name",
    [
        *("logistic", "binary", "forest", "regressor", "boosting", "neighbours", "scaler"),
        *("clusters", "targets", "outliers"),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_answers_are_those_of_scikit_learn(
    program: Program, estimators: Mapping[str, Any], name: str, batched: bool
) -> None:
    estimator = estimators[name]
    methods = [each for each in METHODS if hasattr(estimator, each)]
    contract = program.opened(estimator, max_batch_size=64 if batched else 0)
    (found,) = program.answers(contract, program.request(methods, X=ROWS))
    assert sorted(found) == sorted(methods)
    for method in methods:
        expected = getattr(estimator, method)(ROWS)
        if expected.dtype.kind == "U":
            assert texts(found[method]) == expected.tolist()
            continue
        assert found[method].dtype == expected.dtype
        np.testing.assert_array_equal(found[method].reshape(expected.shape), expected)
    if batched:
        assert {each.ndim for each in found.values()} == {2}


def test_only_requested_outputs_are_computed(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    calls: list[str] = []

    class Watched:
        """Notes its calls."""

        n_features_in_ = 4

        def predict(self, rows: Any) -> Any:
            calls.append("predict")
            return rows[:, 0]

        def predict_proba(self, rows: Any) -> Any:
            calls.append("predict_proba")
            return rows

    contract = program.opened(Watched(), max_batch_size=8)
    calls.clear()
    program.answers(contract, program.request(["predict"], X=ROWS))
    assert calls == ["predict"]


def test_rows_of_several_requests_are_one_call(program: Program) -> None:
    sizes: list[int] = []

    class Watched:
        """Notes the sizes of its batches."""

        n_features_in_ = 4

        def predict(self, rows: Any) -> Any:
            sizes.append(len(rows))
            return rows[:, 0]

    contract = program.opened(Watched(), max_batch_size=8)
    sizes.clear()
    parts = [ROWS[:1], ROWS[1:4], ROWS[4:6]]
    found = program.answers(contract, *(program.request(X=each) for each in parts))
    assert sizes == [6]
    for each, rows in zip(found, parts, strict=True):
        np.testing.assert_array_equal(each["predict"], rows[:, :1])


def test_requests_with_other_outputs_are_computed_apart(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    contract = program.opened(estimators["forest"], max_batch_size=8)
    found = program.answers(
        contract,
        program.request(["predict"], X=ROWS[:2]),
        program.request(["predict_proba"], X=ROWS[2:3]),
        program.request(["predict"], X=ROWS[3:4]),
    )
    assert [list(each) for each in found] == [["predict"], ["predict_proba"], ["predict"]]
    assert found[2]["predict"].tolist() == [[estimators["forest"].predict(ROWS[3:4])[0]]]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (np.full((1, 4), np.nan), "model 'm': Input X contains NaN."),
        (ROWS[:1, :3], "model 'm': input 'X' has rows of 3 features, expected 4"),
        (ROWS[0], "model 'm': input 'X' has 1 dimensions, expected 2"),
    ],
)
def test_one_bad_request_leaves_its_batch_alone(
    program: Program, estimators: Mapping[str, Any], rows: Any, text: str
) -> None:
    contract = program.opened(estimators["binary"], max_batch_size=8)
    good = program.request(X=ROWS[:2])
    first, bad, last = program.answers(contract, good, program.request(X=rows), good)
    assert bad == text
    expected = estimators["binary"].predict(ROWS[:2]).reshape(-1, 1)
    np.testing.assert_array_equal(first["predict"], expected)
    np.testing.assert_array_equal(last["predict"], expected)


def test_nan_reaches_an_estimator_that_takes_it(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    rows = np.where(ROWS > 0.8, np.nan, ROWS)
    contract = program.opened(estimators["boosting"], max_batch_size=64)
    (found,) = program.answers(contract, program.request(X=rows))
    assert texts(found["predict"]) == estimators["boosting"].predict(rows).tolist()


def test_answers_are_cast_to_the_configs_types(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    contract = program.opened(
        estimators["forest"],
        max_batch_size=64,
        input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
        output=[
            {"name": "predict", "data_type": "TYPE_INT32", "dims": [1]},
            {"name": "predict_proba", "data_type": "TYPE_FP32", "dims": [3]},
        ],
    )
    request = program.request(["predict", "predict_proba"], x=ROWS.astype(np.float32))
    (found,) = program.answers(contract, request)
    assert found["predict"].dtype == np.int32
    expected = estimators["forest"].predict_proba(ROWS.astype(np.float32)).astype(np.float32)
    np.testing.assert_array_equal(found["predict_proba"], expected)


def test_texts_are_rows_of_a_vectorizer(program: Program, estimators: Mapping[str, Any]) -> None:
    contract = program.opened(estimators["texts"], max_batch_size=8)
    rows = np.array(TEXTS, dtype=object).reshape(-1, 1)
    found = program.answers(contract, program.request(X=rows), program.request(X=rows[1:2]))
    assert found[0]["predict"].ravel().tolist() == [1, 0, 1, 0]
    assert found[1]["predict"].tolist() == [[0]]


def test_bytes_that_are_no_utf_8_are_refused(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    contract = program.opened(estimators["texts"], max_batch_size=8)
    rows = np.array([[b"\xff"]], dtype=object)
    assert program.answers(contract, program.request(X=rows)) == [
        "model 'm': input 'X' holds bytes that are no UTF-8"
    ]


def test_texts_are_categories_of_an_encoder(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    contract = program.opened(
        estimators["encoder"],
        max_batch_size=64,
        input=[{"name": "word", "data_type": "TYPE_STRING", "dims": [1]}],
    )
    rows = WORDS[:5].reshape(-1, 1)
    found, unknown = program.answers(
        contract,
        program.request(["transform"], word=rows.astype(object)),
        program.request(["transform"], word=np.array([["never"]], dtype=object)),
    )
    expected = estimators["encoder"].transform(rows).toarray()
    np.testing.assert_array_equal(found["transform"], expected)
    assert unknown == "model 'm': Found unknown categories ['never'] in column 0 during transform"


COLUMN = {"data_type": "TYPE_FP64", "dims": [1]}


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_columns_are_put_in_the_order_of_the_estimator(
    program: Program, estimators: Mapping[str, Any], shape: tuple[int, ...]
) -> None:
    backwards = FEATURES[::-1]
    inputs = [{"name": name, **COLUMN} for name in backwards]
    contract = program.opened(estimators["columns"], max_batch_size=64, input=inputs)
    columns = {name: ROWS[:, FEATURES.index(name)].reshape(shape) for name in backwards}
    (found,) = program.answers(contract, program.request(**columns))
    expected = estimators["forest"].predict(ROWS).reshape(-1, 1)
    np.testing.assert_array_equal(found["predict"], expected)


def test_columns_of_different_sizes_are_refused(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    inputs = [{"name": name, **COLUMN} for name in FEATURES]
    contract = program.opened(estimators["columns"], max_batch_size=64, input=inputs)
    columns = dict.fromkeys(FEATURES[1:], ROWS[:2, 0])
    found = program.answers(
        contract,
        program.request(age=ROWS[:3, 0], **columns),
        program.request(**columns),
        program.request(age=ROWS[:2, :2], **columns),
    )
    assert found == [
        "model 'm': its columns have 2 to 3 rows, expected equal",
        "model 'm': input 'age' is missing",
        "model 'm': input 'age' has shape [2, 2], expected one per row",
    ]


def test_an_estimator_that_selects_columns_by_name_gets_data_frames(program: Program) -> None:
    pandas = pytest.importorskip("pandas")
    compose = pytest.importorskip("sklearn.compose")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    frame = pandas.DataFrame({"word": WORDS, "age": ROWS[:, 0]})
    chosen = compose.make_column_transformer(
        (preprocessing.OneHotEncoder(), ["word"]), (preprocessing.StandardScaler(), ["age"])
    ).fit(frame)
    contract = program.opened(
        chosen,
        max_batch_size=64,
        input=[
            {"name": "age", **COLUMN},
            {"name": "word", "data_type": "TYPE_STRING", "dims": [1]},
        ],
    )
    parts = [slice(0, 2), slice(2, 5)]
    found = program.answers(
        contract,
        *(
            program.request(["transform"], word=WORDS[each].astype(object), age=ROWS[each, 0])
            for each in parts
        ),
    )
    for each, answer in zip(parts, found, strict=True):
        np.testing.assert_array_equal(answer["transform"], chosen.transform(frame[each]))


def test_tensors_of_a_config_may_be_reshaped(
    program: Program, estimators: Mapping[str, Any]
) -> None:
    square = {"name": "x", "data_type": "TYPE_FP64", "dims": [2, 2], "reshape": {"shape": [4]}}
    label = {"name": "predict", "data_type": "TYPE_INT64", "dims": [1], "reshape": {"shape": []}}
    contract = program.opened(
        estimators["forest"], max_batch_size=8, input=[square], output=[label]
    )
    (found,) = program.answers(contract, program.request(x=ROWS[:3]))
    np.testing.assert_array_equal(found["predict"], estimators["forest"].predict(ROWS[:3]))
