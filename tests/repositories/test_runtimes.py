"""A repository with one model per runtime and format, configured as for Triton."""

import lightgbm
import numpy as np
import pytest
import skops.io
import xgboost

from gateway.errors import InferenceError
from gateway.models.repository import ModelRepository
from gateway.models.supported_fields import FieldVerdict
from gateway.tools.check import check
from tests.repositories.asking import A, answer, require_sum
from tests.repositories.write_runtimes import FOLDER


def test_no_field_is_refused() -> None:
    findings = check(ModelRepository([FOLDER]))
    assert {each.model for each in findings} == {each.name for each in FOLDER.iterdir()}
    assert [each for each in findings if each.verdict is FieldVerdict.REFUSED] == []


@pytest.mark.parametrize("model", ["onnxruntime_onnx", "openvino_ir", "openvino_onnx", "python"])
def test_a_sum(model: str) -> None:
    require_sum(model)


def test_a_sum_of_inputs_without_names() -> None:
    require_sum("pytorch_libtorch", "INPUT__0", "INPUT__1", "OUTPUT__0")


def test_the_forest_of_xgboost_and_its_checkpoint() -> None:
    booster = xgboost.Booster(model_file=str(FOLDER / "fil_xgboost/1/xgboost.json"))
    expected = booster.inplace_predict(A)
    (found,) = answer("fil_xgboost", {"input__0": A})
    np.testing.assert_array_equal(found["output__0"][:, 1], expected)
    (found,) = answer("fil_checkpoint", {"input__0": A})  # a folder without a config
    np.testing.assert_array_equal(found["output__0"].reshape(-1), expected > 0.5)


def test_the_forest_of_lightgbm() -> None:
    booster = lightgbm.Booster(model_file=str(FOLDER / "fil_lightgbm/1/model.txt"))
    (found,) = answer("fil_lightgbm", {"input__0": A})
    np.testing.assert_array_equal(found["output__0"].reshape(-1), booster.predict(A) > 0.5)


def test_the_pipeline_of_scikit_learn() -> None:
    pipeline = skops.io.load(FOLDER / "sklearn_skops/1/model.skops")
    (found,) = answer("sklearn_skops", {"X": A})
    np.testing.assert_array_equal(found["predict"].reshape(-1), pipeline.predict(A))


def test_a_pickle_needs_the_operators_permission() -> None:
    with pytest.raises(InferenceError, match=r"'model\.pkl' is a pickle"):
        answer("sklearn_pickle", {"X": np.float64(A)})
    allowed = {"backend_config": ["sklearn,allow-pickle=true"]}
    (found,) = answer("sklearn_pickle", {"X": np.float64(A)}, **allowed)
    assert found["predict"].shape[0] == len(A)


def test_decoupled_models() -> None:
    assert [each["OUT"].tolist() for each in answer("square", {"IN": [2]})] == [[2], [2]]
    inputs = {"IN": np.int32([7, 8]), "DELAY": np.uint32([0, 0]), "WAIT": np.uint32([0])}
    assert [each["OUT"].tolist() for each in answer("repeat", inputs)] == [[7], [8]]
