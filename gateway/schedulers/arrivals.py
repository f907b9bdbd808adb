"""What does a request bring with it that decides about its batch?"""

from gateway.batches.padding import MAX_LENGTH, Padding
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, request_prefix
from gateway.schedulers.compatibility import Compatibility
from gateway.schedulers.queue import QueueRules, Waiting
from gateway.schedulers.scheduler import Entry

LENGTH_DIMENSION = 1
"""Of a padded input: the first after the batch."""


class Arrivals:
    """Makes what waits in the queue out of a request; prepared once per model."""

    def __init__(self, config: ModelConfig, rules: QueueRules, padding: Padding) -> None:
        self._rules = rules
        self._padded = frozenset(padding.inputs)
        self._max_length = padding.max_length
        compatibility = Compatibility(config, padding)
        self._key = compatibility.key
        self.uniform = compatibility.uniform
        """Whether any two requests may share a batch."""

    def check(self, request: InferRequest) -> None:
        """Raise INVALID_ARG unless all padded inputs have one length, and one the model takes."""
        if not self._padded:
            return
        found = {
            each.name: each.shape[LENGTH_DIMENSION]
            for each in request.inputs
            if each.name in self._padded
        }
        if len(set(found.values())) > 1:
            lengths = ", ".join(f"'{name}' has {length}" for name, length in found.items())
            raise InferenceError(
                Code.INVALID_ARG,
                f"{request_prefix(request.id)}padded inputs of model '{request.model}' must have "
                f"the same length in dimension {LENGTH_DIMENSION}: {lengths}",
            )
        for name, length in found.items():
            self._check_length(request, name, length)

    def _check_length(self, request: InferRequest, name: str, length: int) -> None:
        if self._max_length is not None and not 1 <= length <= self._max_length:
            raise InferenceError(
                Code.INVALID_ARG,
                f"{request_prefix(request.id)}padded input '{name}' of model '{request.model}' has "
                f"length {length} in dimension {LENGTH_DIMENSION}, expected 1 to "
                f"{self._max_length}, its parameter '{MAX_LENGTH}'",
            )

    def waiting(self, entry: Entry, now_ns: int) -> Waiting:
        """What the queue takes for a request that comes now."""
        request = entry.request
        level = self._rules.level(request.priority)
        return Waiting(
            entry,
            rows=entry.record.batch_size or 1,
            arrived_ns=now_ns,
            level=level,
            deadline_ns=self._rules.deadline_ns(level, request.timeout_us, now_ns),
            key=None if self.uniform else self._key(request),
            length=self._length(request) if self._padded else 1,
        )

    def _length(self, request: InferRequest) -> int:
        for tensor in request.inputs:
            if tensor.name in self._padded:
                return max(1, tensor.shape[LENGTH_DIMENSION])
        return 1
