"""Servers in this process with models of `runtimes`, and their answers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gateway.in_process.server import Server
from tests.repositories.write_runtimes import FOLDER, ROWS

A, B = ROWS[:3], ROWS[3:6]


def answer(
    model: str, inputs: Mapping[str, Any], **options: Any
) -> list[Mapping[str, np.ndarray[Any, Any]]]:
    """The outputs of each response of a model that is loaded for it."""
    explicit = {"model_control_mode": "explicit", "load_model": [model]}
    with Server(model_repository=FOLDER, **explicit, **options) as server:
        return [each.outputs for each in server.model(model).infer(inputs=inputs)]


def require_sum(model: str, first: str = "A", second: str = "B", total: str = "SUM") -> None:
    """Assert that a model adds two tensors of three rows."""
    (found,) = answer(model, {first: A, second: B})
    np.testing.assert_allclose(found[total], A + B, rtol=1e-6)
