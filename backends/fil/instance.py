"""One instance of a forest."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.fil.answers import CONTRIBUTIONS, INPUT, OUTPUT, Answers, squeezed_dims
from backends.fil.forests import Forest
from backends.fil.model_file import clear_failures
from gateway.backend import ModelContext
from gateway.batches.shapes import as_model_sees
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, Tensor, array_tensor, format_shape
from gateway.tensor_runtime.instance import TensorInstance


class FilInstance(TensorInstance):
    """Answers in shapes without dims of 1, as Triton, while the config has them.

    Contributions of a row take hundreds of times as long as its prediction, so that a model with
    them is not steady.
    """

    def __init__(self, context: ModelContext, forest: Forest, answers: Answers) -> None:
        config = as_model_sees(context.config)
        squeezed = [replace(each, dims=squeezed_dims(each)) for each in config.output]
        self.steady = all(each.name != CONTRIBUTIONS for each in config.output)
        self._model = config.name
        self._forest = forest
        self._features = forest.features
        self._answers = answers
        self._flat = answers.columns == 1 and any(
            each.name == OUTPUT and (1 in each.dims or not each.dims) for each in config.output
        )
        self._predicting = clear_failures(
            context.path, f"model '{config.name}' failed", "prediction", forest.errors
        )
        # It starts a thread: must be last.
        super().__init__(replace(config, output=tuple(squeezed)), context.name)

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        rows = self._checked(inputs[INPUT].array())
        return {
            name: array_tensor(name, Datatype.FP32, self._output(name, rows)) for name in outputs
        }

    def release(self) -> None:
        del self._forest

    def _checked(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows as the libraries need them; they do not all check the number of columns."""
        if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != self._features:
            raise InferenceError(
                Code.INVALID_ARG,
                f"input '{INPUT}' of model '{self._model}' has datatype {rows.dtype} and shape "
                f"{format_shape(rows.shape)}, expected float32 and "
                f"{format_shape((-1, self._features))}",
            )
        return np.require(rows, requirements=("C", "A"))

    def _output(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with self._predicting:
            if name == CONTRIBUTIONS:
                return self._forest.contributions(rows)
            found = self._answers.made(self._forest.predict(rows))
        return found.reshape(-1) if self._flat else found
