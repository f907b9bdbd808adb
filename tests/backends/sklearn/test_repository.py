"""Models of scikit-learn in the repository of all runtimes."""

import numpy as np
import pytest
import skops.io

from gateway.errors import InferenceError
from tests.repositories.asking import A, answer
from tests.repositories.write_runtimes import FOLDER


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
