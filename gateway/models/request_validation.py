"""Validation of requests against a model's config, in Triton's order and with its texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from gateway.config import ModelConfig, ModelInput
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, RequestedOutput, request_prefix
from gateway.tensor import (
    SIZES,
    Datatype,
    Tensor,
    cut_element,
    cut_length,
    element_runs,
    format_shape,
)
from gateway.threads import LARGE_BYTES

BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)

MAX_BYTES = 2**63 - 1
OBJECT_BYTES = 8
"""Size of one element of BYTES in an array (bytes)."""


class RequestRules:
    """The checks of one config, prepared once per model."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._batching = config.batching
        self._most_rows = config.max_batch_size
        self._datatypes = {each.name: each.datatype for each in config.input}
        self._shapes = {each.name: config.wire_shape(each) for each in config.input}
        self._required = [each.name for each in config.input if not each.optional]
        self._outputs = frozenset(each.name for each in config.output)
        self._fixed_size = FixedSizeRequests(config, MAX_BYTES)

    def check(self, request: InferRequest) -> int:
        """Return the request's batch size (1 if the model does not batch).

        Raises InferenceError INVALID_ARG with Triton's text for the first failure.
        """
        return self._fixed_size.batch_size(request) or self._check_each(request)

    def _check_each(self, request: InferRequest) -> int:
        self._check_outputs(request)
        self._check_names(request)
        batch_size = self._check_batch(request) if self._batching else 1
        for tensor in request.inputs:
            self._check_tensor(tensor, request)
        return batch_size

    def _check_outputs(self, request: InferRequest) -> None:
        names = [output.name for output in request.outputs]
        for name in names:
            if name not in self._outputs:
                _refuse_bare(f"unexpected inference output '{name}' for model '{self._model}'")
        if (twice := _repeated(names)) is not None:
            _refuse(request, f"output '{twice}' already exists in request")

    def _check_names(self, request: InferRequest) -> None:
        names = [tensor.name for tensor in request.inputs]
        if (twice := _repeated(names)) is not None:
            _refuse(request, f"input '{twice}' already exists in request")
        missing = [name for name in self._required if name not in names]
        if missing or len(names) > len(self._datatypes):
            self._refuse_count(request, names, missing)
        for name in names:
            if name not in self._datatypes:
                _refuse_bare(f"unexpected inference input '{name}' for model '{self._model}'")

    def _refuse_count(
        self, request: InferRequest, names: Sequence[str], missing: Sequence[str]
    ) -> NoReturn:
        required, total = len(self._required), len(self._datatypes)
        expected = (
            f"expected {total} inputs"
            if required == total
            else f"expected number of inputs between {required} and {total}"
        )
        _refuse(
            request,
            f"{expected} but got {len(names)} inputs for model '{self._model}'. "
            # Triton's empty list of missing inputs has no opening bracket.
            f"Got input(s) {_quoted(names)}, but missing required input(s) "
            f"{_quoted(missing) if missing else ']'}. "
            "Please provide all required input(s).",
        )

    def _check_batch(self, request: InferRequest) -> int:
        sizes = [self._batch_of(tensor, request) for tensor in request.inputs]
        for tensor, size in zip(request.inputs, sizes, strict=True):
            if size != sizes[0]:
                _refuse(
                    request,
                    f"input '{tensor.name}' batch size does not match other inputs for "
                    f"'{self._model}'",
                )
        limit = self._most_rows
        if sizes and sizes[0] > limit:
            _refuse(request, f"inference request batch-size must be <= {limit} for '{self._model}'")
        return sizes[0] if sizes else 1

    def _batch_of(self, tensor: Tensor, request: InferRequest) -> int:
        if not tensor.shape:
            _refuse(
                request,
                f"input '{tensor.name}' has no shape but model requires batch dimension for "
                f"'{self._model}'",
            )
        return tensor.shape[0]

    def _check_tensor(self, tensor: Tensor, request: InferRequest) -> None:
        expected = self._datatypes[tensor.name]
        if tensor.datatype is not expected:
            _refuse(
                request,
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
                f"'{self._model}' expects '{expected}'",
            )
        smallest = min(tensor.shape, default=0)
        if smallest < -1:
            found = format_shape(tensor.shape)
            _refuse_bare(f"tensor '{tensor.name}' contains an invalid dimension {found}")
        if smallest < 0:
            _refuse(
                request,
                f"All input dimensions should be specified for input '{tensor.name}' for model "
                f"'{self._model}', got {format_shape(tensor.shape)}",
            )
        self._check_shape(tensor, request)
        self._check_size(tensor, request)

    def _check_shape(self, tensor: Tensor, request: InferRequest) -> None:
        expected = self._shapes[tensor.name]
        if fits(tensor.shape, expected):
            return
        note = BATCH_NOTE if self._batching else ""
        _refuse(
            request,
            f"unexpected shape for input '{tensor.name}' for model '{self._model}'. Expected "
            f"{format_shape(expected)}, got {format_shape(tensor.shape)}. {note}",
        )

    def _check_size(self, tensor: Tensor, request: InferRequest) -> None:
        if 0 in tensor.shape:
            # Runtimes refuse a shape that is too large even if it has no elements.
            _check_bytes(tensor, math.prod(dim for dim in tensor.shape if dim))
        if tensor.datatype is Datatype.BYTES:
            self._check_elements(tensor, request)
            return
        count = self._count(tensor)
        _check_bytes(tensor, count)
        expected = count * SIZES[tensor.datatype]
        found = len(tensor.raw())
        if found != expected:
            _refuse(
                request,
                f"input byte size mismatch for input '{tensor.name}' for model '{self._model}'. "
                f"Expected {expected}, got {found}",
            )

    def _check_elements(self, tensor: Tensor, request: InferRequest) -> None:
        expected = self._count(tensor)
        found = self._count_elements(tensor, expected, request)
        if found < expected:
            _refuse(
                request,
                f"expected {expected} string elements for inference input '{tensor.name}' for "
                f"model '{self._model}', got {found}",
            )
        if found > expected:
            self._refuse_another(tensor, expected, request)

    def _refuse_another(self, tensor: Tensor, expected: int, request: InferRequest) -> NoReturn:
        # Triton counts only the first element above the limit.
        _refuse(
            request,
            f"unexpected number of string elements {expected + 1} for inference input "
            f"'{tensor.name}' for model '{self._model}', expecting {expected}",
        )

    def _count(self, tensor: Tensor) -> int:
        """The number of elements expected; an empty batch counts as one item."""
        nothing = self._batching and tensor.shape[0] == 0
        return math.prod(tensor.shape[1:]) if nothing else tensor.count

    def _count_elements(self, tensor: Tensor, expected: int, request: InferRequest) -> int:
        if isinstance(tensor.data, tuple):
            return len(tensor.data)
        found = 0
        size = len(tensor.data)
        for start, end, count in element_runs(tensor.raw()):
            if start > size:
                _refuse(
                    request, cut_length(f"'{tensor.name}' for model '{self._model}'", start, size)
                )
            if found + count > expected:
                self._refuse_another(tensor, expected, request)
            if end > size:
                _refuse_bare(cut_element(f"'{tensor.name}'", start, end, size))
            found += count
        return found


def takes_long(request: InferRequest) -> bool:
    """Whether a check blocks for more than about a millisecond: large BYTES are counted."""
    return any(
        tensor.datatype is Datatype.BYTES
        and isinstance(tensor.data, bytes | bytearray | memoryview)
        and len(tensor.data) > LARGE_BYTES
        for tensor in request.inputs
    )


def fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a shape has the expected rank and fixed dims; -1 accepts any size."""
    return len(shape) == len(expected) and all(
        want in (-1, have) for have, want in zip(shape, expected, strict=True)
    )


def _check_bytes(tensor: Tensor, count: int) -> None:
    if count * SIZES.get(tensor.datatype, OBJECT_BYTES) > MAX_BYTES:
        _refuse_bare(f"byte size for tensor '{tensor.name}' exceeds maximum size of {MAX_BYTES}")


def _repeated(names: Sequence[str]) -> str | None:
    """The first name that occurs twice, if any."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _refuse(request: InferRequest, message: str) -> NoReturn:
    _refuse_bare(request_prefix(request.id) + message)


def _refuse_bare(message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, message)


def _quoted(names: Sequence[str]) -> str:
    return f"[{','.join(repr(name) for name in names)}]"


@dataclass(frozen=True, slots=True)
class _FixedInput:
    """An input of one size: `shape` and `byte_size` are those of an item of the batch.

    Each input of a model has another `bit`.
    """

    datatype: Datatype
    shape: tuple[int, ...]
    byte_size: int
    bit: int

    @classmethod
    def of(cls, given: ModelInput, bit: int) -> "_FixedInput | None":
        """None for an input of variable size or without elements."""
        if given.datatype is Datatype.BYTES or min(given.dims, default=1) < 1:
            return None
        byte_size = SIZES[given.datatype]
        for dim in given.dims:
            byte_size *= dim
        return cls(given.datatype, given.dims, byte_size, bit)


class FixedSizeRequests:
    """The fast check, for requests with every input of the config once and as it says.

    A request that fails it may be valid: `RequestRules` decides. A model with an input of variable
    size has no fast check. `most_bytes` is the limit of an input.
    """

    def __init__(self, config: ModelConfig, most_bytes: int) -> None:
        inputs = enumerate(config.input)
        found = {each.name: _FixedInput.of(each, 1 << place) for place, each in inputs}
        self._inputs = {name: fixed for name, fixed in found.items() if fixed is not None}
        self._batching = config.batching
        self._most_rows = config.max_batch_size if config.batching else 1
        sizes = [fixed.byte_size * self._most_rows for fixed in self._inputs.values()]
        self._usable = len(self._inputs) == len(config.input) and max(sizes, default=0) > 0
        self._usable = self._usable and max(sizes) <= most_bytes
        self._outputs = frozenset(each.name for each in config.output)
        # The frontends' memos repeat the same object.
        self._latest_outputs: Sequence[RequestedOutput] = ()
        self._every = (1 << len(config.input)) - 1

    def batch_size(self, request: InferRequest) -> int:
        """The request's batch size (1 if the model does not batch); 0 if unknown."""
        inputs = request.inputs
        if not self._usable or len(inputs) != len(self._inputs):
            return 0
        batch: tuple[int, ...] = ()
        rows, missing = 1, self._every
        if self._batching:
            batch = inputs[0].shape[:1]
            rows = batch[0] if batch else 0
            if not 0 < rows <= self._most_rows:
                return 0
        for tensor in inputs:
            fixed = self._inputs.get(tensor.name)
            if fixed is None or tensor.datatype is not fixed.datatype:
                return 0
            if tensor.shape != batch + fixed.shape or len(tensor.data) != rows * fixed.byte_size:
                return 0
            missing &= ~fixed.bit
        outputs = request.outputs
        if missing or (outputs is not self._latest_outputs and not self._has_outputs(outputs)):
            return 0
        return rows

    def _has_outputs(self, outputs: Sequence[RequestedOutput]) -> bool:
        """Whether each is an output of the model, and named once; if so, they may be the latest."""
        wanted = {output.name for output in outputs}
        if len(wanted) < len(outputs) or not wanted <= self._outputs:
            return False
        if not any(output.region for output in outputs):  # a kept one would not be released
            self._latest_outputs = outputs
        return True
