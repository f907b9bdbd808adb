"""A network behind the gateway is held against the one that must be right."""

from pathlib import Path

import pytest

from loadtests.gpu_check.parts import Asked
from loadtests.gpu_check.tensor_model import Array, compare, weights
from loadtests.support.rounds import LoadTestFailed

ASKED = Asked(device="cpu", streams=[1], max_tokens=1, secs=0.05)


def echo(x: Array) -> Array:
    return x


def nothing(folder: Path) -> None:
    """A backend that needs no file."""


def test_a_backend_that_cannot_load_is_a_failure_with_its_reason() -> None:
    with pytest.raises(LoadTestFailed, match="backend onnxruntime"):
        compare("onnxruntime", nothing, echo, echo, ASKED)


def test_outputs_that_differ_are_noticed() -> None:
    onnxruntime = pytest.importorskip("loadtests.gpu_check.onnxruntime")
    first, second = weights()

    def right(x: Array) -> Array:
        return (x @ first).clip(0) @ second

    def differing(x: Array) -> Array:
        return right(x) * 1.01

    for network, ok in ((right, True), (differing, False)):
        found = compare("onnxruntime", onnxruntime.write_model, network, network, ASKED)
        assert found[0].ok is ok
