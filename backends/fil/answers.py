"""Outputs of a forest: its tensors, and the classes, probabilities or values in them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.fil.forests import Forest
from backends.fil.parameters import FilParameters
from gateway.batches.shapes import ANY_SIZE, as_model_sees
from gateway.config import ModelConfig, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.checks import check
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor

INPUT = "input__0"
OUTPUT = "output__0"
CONTRIBUTIONS = "treeshap_output"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Answers:
    """The numbers of `output__0`: `columns` per row.

    Without `probabilities` a classifier answers the number of a class.
    """

    classifies: bool
    probabilities: bool
    threshold: np.float32
    columns: int

    @classmethod
    def of(cls, forest: Forest, config: ModelConfig) -> "Answers":
        """The answers that a config asks of a forest."""
        asked = FilParameters.read(config)
        classifies = forest.classifies if asked.classifies is None else asked.classifies
        columns = forest.classes
        if classifies and not asked.probabilities:
            columns = 1
        elif classifies and columns == 1 and _inner_dims(config)[-1:] != (1,):
            columns = 2
        return cls(classifies, asked.probabilities, np.float32(asked.threshold), columns)

    def made(self, values: Array) -> Array:
        """The answers to the predictions of a forest, of `columns` per row."""
        if not self.classifies:
            return values
        if self.probabilities:
            return np.hstack([1 - values, values]) if self.columns > values.shape[1] else values
        if values.shape[1] == 1:
            return (values > self.threshold).astype(np.float32)
        # As in Triton: the first of the largest, and class 0 if none is above zero.
        positive = np.where(values > 0, values, np.float32(0))
        numbers: Array = np.argmax(positive, axis=1, keepdims=True)
        return numbers.astype(np.float32)


def signature(forest: Forest, answers: Answers, config: ModelConfig) -> ModelSignature:
    """The tensors of a forest, without contributions, which must be asked for."""
    inner = _inner_dims(config)
    squeezed = answers.columns == 1 and not inner and bool(config.output) and config.batching
    return ModelSignature(
        {INPUT: _tensor(INPUT, forest.features)},
        {OUTPUT: _tensor(OUTPUT, *(() if squeezed else (answers.columns,)))},
    )


def check_forest(forest: Forest, answers: Answers, config: ModelConfig) -> None:
    """Raise InferenceError if the config contradicts the forest."""
    known = signature(forest, answers, config)
    asked = any(each.name == CONTRIBUTIONS for each in config.output)
    if asked and not forest.explains:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"unable to load model '{config.name}', output '{CONTRIBUTIONS}' is computed for files "
            "of XGBoost and LightGBM; remove it from the configuration, or serve such a file",
        )
    shap = _tensor(CONTRIBUTIONS, forest.classes * (forest.features + 1))
    more = {CONTRIBUTIONS: shap} if forest.explains else {}
    check(config, ModelSignature(known.inputs, {**known.outputs, **more}))


def squeezed_dims(output: ModelOutput) -> tuple[int, ...]:
    """The dims that the model answers, without those of 1."""
    return tuple(size for size in output.dims if size != 1)


def _tensor(name: str, *dims: int) -> ModelTensor:
    return ModelTensor(name, "FP32", DataType.TYPE_FP32, (ANY_SIZE, *dims))


def _inner_dims(config: ModelConfig) -> tuple[int, ...]:
    """The dims of `output__0` as the model sees them; empty if the config lacks it."""
    found = (each.dims for each in as_model_sees(config).output if each.name == OUTPUT)
    return tuple(next(found, ()))
