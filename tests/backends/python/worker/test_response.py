"""The responses that model.py makes."""

from typing import Any

import numpy as np
import pytest

from backends.python.worker.sluice_worker.errors import (
    ErrorCode,
    TritonError,
    TritonModelException,
)
from backends.python.worker.sluice_worker.response import (
    InferenceResponse,
    get_output_tensor_by_name,
)
from backends.python.worker.sluice_worker.tensor import Tensor


def test_an_output_must_be_there() -> None:
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse([None])  # type: ignore[list-item]
    assert str(caught.value) == "Output tensor for inference response should not be empty."


@pytest.mark.parametrize("given", [[], [1], "", "text", 0])
def test_parameters_are_a_dict(given: Any) -> None:
    with pytest.raises(TritonModelException, match=f"Expect dict, got {type(given)}"):
        InferenceResponse(parameters=given)


def test_no_parameters_are_parameters() -> None:
    for given in (None, {}):
        assert InferenceResponse(parameters=given).parameters() == ""


@pytest.mark.parametrize("given", [{"output_tensors": [5]}, {"error": "text"}])
def test_other_types_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        InferenceResponse(**given)


def test_with_an_error_there_are_no_outputs() -> None:
    output = Tensor("y", np.zeros(1))
    response = InferenceResponse([output], TritonError("no", TritonError.NOT_FOUND))
    assert response.has_error()
    assert response.output_tensors() == []
    error = response.error()
    assert error is not None
    assert (error.message(), error.code()) == ("no", ErrorCode.NOT_FOUND)


def test_an_output_is_found_by_its_name() -> None:
    output = Tensor("y", np.zeros(1))
    response = InferenceResponse([output], parameters={"n": 1})
    assert get_output_tensor_by_name(response, "y") is output
    assert get_output_tensor_by_name(response, "z") is None
    assert (response.has_error(), response.error()) == (False, None)
    assert response.parameters() == '{"n": 1}'


def test_errors_are_internal_unless_they_say_otherwise() -> None:
    assert TritonError("x").code() == TritonError.INTERNAL == 1


@pytest.mark.parametrize(("message", "code"), [(5, 1), ("x", 77), ("x", "INTERNAL")])
def test_an_error_has_a_text_and_one_of_the_codes(message: Any, code: Any) -> None:
    with pytest.raises(TypeError):
        TritonError(message, code)
