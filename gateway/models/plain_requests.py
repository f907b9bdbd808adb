"""Is it plain to see that a request fits its model? Most are, and need no check one by one."""

from dataclasses import dataclass

from gateway.config import ModelConfig, ModelInput
from gateway.messages import InferRequest
from gateway.tensor import SIZES, Datatype


@dataclass(frozen=True, slots=True)
class _Plain:
    """An input of one size: `shape` and `byte_size` are those of an item of the batch."""

    datatype: Datatype
    shape: tuple[int, ...]
    byte_size: int

    @classmethod
    def of(cls, given: ModelInput) -> "_Plain | None":
        """None for an input whose size depends on the request, or is none at all."""
        if given.datatype is Datatype.BYTES or min(given.dims, default=1) < 1:
            return None
        byte_size = SIZES[given.datatype]
        for dim in given.dims:
            byte_size *= dim
        return cls(given.datatype, given.dims, byte_size)


class PlainRequests:
    """Those that have every input of the config, once each, and exactly as it says.

    A request that is not plain may fit as well: `RequestRules` knows. A model with an input that
    is not of one size has no plain requests. `most_bytes` is what an input may have.
    """

    def __init__(self, config: ModelConfig, most_bytes: int) -> None:
        found = {each.name: _Plain.of(each) for each in config.input}
        self._inputs = {name: plain for name, plain in found.items() if plain is not None}
        self._batching = config.batching
        self._most_rows = config.max_batch_size if config.batching else 1
        sizes = [plain.byte_size * self._most_rows for plain in self._inputs.values()]
        self._some = len(self._inputs) == len(config.input) and max(sizes, default=0) > 0
        self._some = self._some and max(sizes) <= most_bytes
        self._outputs = frozenset(each.name for each in config.output)

    def batch_size(self, request: InferRequest) -> int:
        """The request's batch size (1 if the model does not batch); 0 if it is not plain."""
        inputs = request.inputs
        if not self._some or len(inputs) != len(self._inputs):
            return 0
        batch = inputs[0].shape[:1] if self._batching else ()
        rows = sum(batch) if self._batching else 1
        if not 0 < rows <= self._most_rows:
            return 0
        for tensor in inputs:
            plain = self._inputs.get(tensor.name)
            if plain is None or tensor.datatype is not plain.datatype:
                return 0
            if tensor.shape != batch + plain.shape or len(tensor.data) != rows * plain.byte_size:
                return 0
        given = {tensor.name for tensor in inputs}
        wanted = {output.name for output in request.outputs}
        once = len(given) == len(inputs) and len(wanted) == len(request.outputs)
        return rows if once and wanted <= self._outputs else 0
