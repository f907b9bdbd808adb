"""Which requests may share a batch?"""

from collections.abc import Hashable

from gateway.batches.padding import Padding
from gateway.config import ModelConfig
from gateway.messages import InferRequest
from gateway.tensor import Tensor


class Compatibility:
    """Gives each request a key; only requests with equal keys may share a batch.

    Inputs of variable size must have items of one shape unless they are ragged; of a padded one
    the length may differ. Shape tensors must be equal. If the model has optional inputs, the same
    ones must be present.
    """

    def __init__(self, config: ModelConfig, padding: Padding) -> None:
        self._optional = any(each.optional for each in config.input)
        first = 1 if config.batching else 0
        self._variable = {
            each.name: first + (each.name in padding.inputs)
            for each in config.input
            if not each.allow_ragged_batch
            and -1 in each.dims[1 if each.name in padding.inputs else 0 :]
        }
        self._shapes = frozenset(each.name for each in config.input if each.is_shape_tensor)
        self._uniform = not (self._optional or self._variable or self._shapes)

    @property
    def uniform(self) -> bool:
        """Whether any two requests may share a batch."""
        return self._uniform

    def key(self, request: InferRequest) -> Hashable:
        """Equal for requests that may share a batch."""
        if self._uniform:
            return None
        return frozenset(part for tensor in request.inputs if (part := self._part(tensor)))

    def _part(self, tensor: Tensor) -> tuple[Hashable, ...]:
        name = tensor.name
        if name in self._shapes:
            return (name, tensor.shape, bytes(tensor.raw()))
        if name in self._variable:
            return (name, tensor.shape[self._variable[name] :])
        return (name,) if self._optional else ()
