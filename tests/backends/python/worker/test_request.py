"""The requests that model.py makes."""

from typing import Any

import numpy as np
import pytest

from backends.python.worker.sluice_worker.errors import TritonModelException
from backends.python.worker.sluice_worker.request import InferenceRequest
from backends.python.worker.sluice_worker.tensor import Tensor

X = Tensor("x", np.zeros(1, np.float32))
PLAIN: dict[str, Any] = {"inputs": [X], "requested_output_names": ["y"], "model_name": "m"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"inputs": [None]},
            "Input tensor for request with id 'r' and model name 'm' should not be empty.",
        ),
        (
            {"requested_output_names": [""]},
            "Requested output name for request with id 'r' and model name 'm' should not be empty.",
        ),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        (
            {"parameters": {1: 1}},
            "Expect parameters keys to have type str, found type <class 'int'>",
        ),
        (
            {"parameters": {"k": 1.5}},
            "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        (
            {"parameters": {"k": 1 << 63}},
            f"Parameter 'k' is {1 << 63}, which 64 bits cannot hold",
        ),
    ],
)
def test_invalid_arguments_of_a_request_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TritonModelException) as caught:
        InferenceRequest(**{**PLAIN, "request_id": "r", **fields})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "missing",
    [
        *("inputs", "requested_output_names", "model_name", "request_id", "model_version"),
        *("correlation_id", "flags", "timeout"),
    ],
)
def test_none_is_no_value(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        InferenceRequest(**{**PLAIN, missing: None})


@pytest.mark.parametrize(
    "fields",
    [
        {"requested_output_names": [None]},
        {"requested_output_names": [1]},
        {"inputs": [1]},
        {"inputs": "x"},
    ],
)
def test_lists_have_the_types_that_triton_accepts(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(fields))):
        InferenceRequest(**{**PLAIN, **fields})


def test_lists_may_be_empty() -> None:
    request = InferenceRequest(**{**PLAIN, "inputs": [], "requested_output_names": []})
    assert (request.inputs(), request.requested_output_names()) == ([], set())


def test_parameters_are_json_text() -> None:
    request = InferenceRequest(**PLAIN, parameters={"a": "é", "b": True})
    assert request.parameters() == '{"a": "\\u00e9", "b": true}'
    assert InferenceRequest(**PLAIN).parameters() == ""


def test_a_request_has_its_fields() -> None:
    request = InferenceRequest(**PLAIN, correlation_id="c", flags=1, timeout=5)
    request.set_flags(2)
    assert (request.correlation_id(), request.flags(), request.timeout()) == ("c", 2, 5)
    assert request.requested_output_names() == {"y"}
    assert request.inputs() == [X]
    assert not request.is_cancelled()
