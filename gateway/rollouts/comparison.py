"""Answers of stable and of a copy: kept within a limit, and compared."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from gateway.cuda_driver import DeviceMemory
from gateway.messages import InferResponse
from gateway.openai_contract import RESPONSE
from gateway.rollouts.observation import MOST_ELEMENTS
from gateway.tensor import BF16_BITS, NUMPY_TYPES, Datatype, Tensor

MOST_BYTES = 16 << 20
"""The size of an answer that is compared, and of a request that is copied."""
TOLERANCES: Mapping[Datatype, tuple[float, float]] = {
    Datatype.FP64: (1e-9, 1e-12),
    Datatype.FP32: (1e-4, 1e-6),
    Datatype.FP16: (2e-2, 1e-3),
    Datatype.BF16: (2e-2, 1e-3),
}
"""The relative and the absolute tolerance; other datatypes are compared exactly."""
WORDS = frozenset(
    {"arguments", "content", "delta", "embedding", "finish_reason", "name", "score", "text"}
)
"""The members of OpenAI's answers that are compared; ids and times differ always."""


class TensorKeeper:
    """Keeps tensors as they are now, up to a size; none of a GPU's memory."""

    def __init__(self) -> None:
        self.is_whole = True
        self._size = 0

    def add(self, size: int) -> bool:
        """Count bytes; whether they, and all before, are within the size."""
        self._size += size
        self.is_whole = self.is_whole and self._size <= MOST_BYTES
        return self.is_whole

    def keep(self, tensor: Tensor, *, copied: bool) -> Tensor | None:
        """The tensor; None beyond the size. Memory of another process is `copied`: it changes."""
        if isinstance(tensor.data, DeviceMemory):
            self.is_whole = False
            return None
        if not self.add(byte_size(tensor)):
            return None
        if not copied or isinstance(tensor.data, tuple):
            return tensor
        return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data))


class KeptAnswer:
    """The outputs of a request's responses, in order; texts of one element are joined by name.

    Versions may cut the same text into different responses.
    """

    def __init__(self) -> None:
        self.texts: dict[str, bytearray] = {}
        self.tensors: list[Tensor] = []
        self._keeper = TensorKeeper()

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer is kept."""
        return self._keeper.is_whole

    def add(self, response: InferResponse) -> None:
        """Add a response."""
        for tensor in response.outputs:
            if tensor.datatype is Datatype.BYTES and tensor.count == 1:
                self.add_texts(tensor.name, tensor.elements())
            elif found := self._keeper.keep(tensor, copied=bool(response.shared_bytes)):
                self.tensors.append(found)

    def add_texts(self, name: str, texts: Sequence[bytes]) -> None:
        """Add responses of a text each."""
        for text in texts:
            if self._keeper.add(len(text)):
                known = self.texts.setdefault(name, bytearray())
                known += b"".join(_words(text)) if name == RESPONSE else text

    def differs(self, other: "KeptAnswer") -> bool | None:
        """Whether the answers differ; None if one of them is not whole."""
        if not (self.is_whole and other.is_whole):
            return None
        if self.texts != other.texts or len(self.tensors) != len(other.tensors):
            return True
        return any(map(_differ, self.tensors, other.tensors))


def byte_size(tensor: Tensor) -> int:
    """The size of the data of a tensor, which is not in the memory of a GPU."""
    data = tensor.data
    return sum(map(len, data)) if isinstance(data, tuple) else len(data)


def _differ(one: Tensor, other: Tensor) -> bool:
    if (one.name, one.datatype, one.shape) != (other.name, other.datatype, other.shape):
        return True
    if one.datatype is Datatype.BYTES:
        return one.elements() != other.elements()
    if one.data == other.data:
        return False
    if one.datatype not in TOLERANCES:
        return True
    relative, absolute = TOLERANCES[one.datatype]
    found, expected = _sample(one), _sample(other)
    if found.size != expected.size:
        return True
    return not np.allclose(found, expected, relative, absolute, equal_nan=True)


def _sample(tensor: Tensor) -> Any:
    """At most MOST_ELEMENTS of the elements, as floats."""
    data = tensor.raw()
    dtype = NUMPY_TYPES.get(tensor.datatype, BF16_BITS)
    values = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    values = values[:: -(-values.size // MOST_ELEMENTS) or 1]
    if tensor.datatype is Datatype.BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def _words(text: bytes) -> Iterator[bytes]:
    """The compared members of one of OpenAI's answers; another text as it is."""
    try:
        yield from _members(orjson.loads(text), "")
    except orjson.JSONDecodeError:
        yield text


def _members(value: Any, name: str) -> Iterator[bytes]:
    if isinstance(value, dict):
        for member, inner in value.items():
            yield from _members(inner, member)
    elif isinstance(value, list):
        for inner in value:
            yield from _members(inner, name)
    elif name in WORDS and value is not None:
        yield str(value).encode()
