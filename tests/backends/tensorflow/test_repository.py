"""Models of TensorFlow in the repository of all runtimes."""

import pytest

from tests.repositories.asking import require_sum


@pytest.mark.parametrize("model", ["tensorflow_savedmodel", "tensorflow_graphdef"])
def test_a_sum(model: str) -> None:
    require_sum(model)
