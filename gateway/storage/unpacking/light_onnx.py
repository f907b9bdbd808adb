"""Conversion of a test model of the package `onnx` to a model to serve."""

from pathlib import Path

import onnx

from gateway.storage.unpacking.process import Report

CONSTANTS_SINCE = 4
"""The IR version from which on initialisers need not be inputs as well."""


def unpack(source: Path, folder: Path, report: Report) -> None:
    """Write `model.onnx` into `folder`: its weights are constants, no inputs that may be set."""
    report("reading", 0.5)
    model = onnx.load(source)
    weights = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.ir_version = max(CONSTANTS_SINCE, model.ir_version)
    report("writing", 0.8)
    onnx.save(model, folder / "model.onnx")
