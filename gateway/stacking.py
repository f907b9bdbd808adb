"""How do the tensors of several requests become one batch, and its outputs theirs again?"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.config import ModelConfig
from gateway.messages import InferRequest
from gateway.tensor import Tensor, array_tensor


class Stacking:
    """Gathers the inputs of an execution, and scatters its outputs; prepared once per model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def gather(self, requests: Sequence[InferRequest]) -> dict[str, Tensor]:
        """The inputs of one execution as the runtime sees them, by name."""
        if len(requests) == 1:
            return {tensor.name: tensor for tensor in requests[0].inputs}
        return {
            tensor.name: array_tensor(
                tensor.name, tensor.datatype, np.concatenate([_array(r, tensor) for r in requests])
            )
            for tensor in requests[0].inputs
        }

    def wanted(self, requests: Sequence[InferRequest]) -> tuple[str, ...]:
        """The outputs that any of the requests asks for, in the config's order."""
        names = {output.name for request in requests for output in request.outputs}
        if not all(request.outputs for request in requests):
            names.update(each.name for each in self._config.output)
        return tuple(each.name for each in self._config.output if each.name in names)

    def scatter(
        self, outputs: Mapping[str, Tensor], requests: Sequence[InferRequest]
    ) -> Iterable[tuple[Tensor, ...]]:
        """Each request's own outputs."""
        row = 0
        for request in requests:
            rows = request.inputs[0].shape[0] if len(requests) > 1 else -1
            asked = {output.name for output in request.outputs} or set(outputs)
            yield tuple(
                _rows(tensor, row, rows) for name, tensor in outputs.items() if name in asked
            )
            row += rows


def _array(request: InferRequest, like: Tensor) -> npt.NDArray[Any]:
    tensor = request.input(like.name)
    assert tensor is not None  # noqa: S101 - the batcher combines only equal sets of inputs
    return tensor.array()


def _rows(tensor: Tensor, start: int, rows: int) -> Tensor:
    if rows < 0:
        return tensor
    size = len(tensor.raw()) // tensor.shape[0]
    data = memoryview(tensor.raw())[start * size : (start + rows) * size]
    return replace(tensor, shape=(rows, *tensor.shape[1:]), data=data)
