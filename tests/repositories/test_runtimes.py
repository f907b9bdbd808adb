"""A repository with one model per runtime and format, configured as for Triton."""

import lightgbm
import numpy as np
import pytest
import xgboost

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


def test_decoupled_models() -> None:
    assert [each["OUT"].tolist() for each in answer("square", {"IN": [2]})] == [[2], [2]]
    inputs = {"IN": np.int32([7, 8]), "DELAY": np.uint32([0, 0]), "WAIT": np.uint32([0])}
    assert [each["OUT"].tolist() for each in answer("repeat", inputs)] == [[7], [8]]
