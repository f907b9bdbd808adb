"""Answers of stable and of a copy: kept within a limit, and compared."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from gateway.cuda_driver import DeviceMemory
from gateway.messages import InferResponse
from gateway.models.golden.tensor_checks import TOLERANCES
from gateway.openai_contract import RESPONSE
from gateway.rollouts.observation import MOST_ELEMENTS
from gateway.tensor import BF16_BITS, NUMPY_TYPES, Buffer, Datatype, Tensor, bf16_floats

MOST_BYTES = 16 << 20
"""The size of an answer that is compared, and of a request that is copied."""
WORDS = frozenset(
    {"arguments", "content", "delta", "embedding", "finish_reason", "name", "score", "text"}
)
"""The members of OpenAI's answers that are compared; ids and times differ always."""


class TensorKeeper:
    """Keeps tensors as they are now, up to a size; none of a GPU's memory."""

    def __init__(self) -> None:
        self.is_whole = True
        self.size = 0

    def add(self, size: int) -> bool:
        """Count bytes; whether they, and all before, are within the size."""
        self.size += size
        self.is_whole = self.is_whole and self.size <= MOST_BYTES
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
    """The outputs of a request's responses, in order, of `size` bytes.

    Texts of one element are joined by name: versions may cut the same text into different
    responses.
    """

    def __init__(self) -> None:
        self.texts: dict[str, list[bytes]] = {}
        self.tensors: list[Tensor] = []
        self._keeper = TensorKeeper()

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer is kept."""
        return self._keeper.is_whole

    @property
    def size(self) -> int:
        """The bytes of the answer, kept or not."""
        return self._keeper.size

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
                self.texts.setdefault(name, []).append(text)

    def differs(self, other: "KeptAnswer") -> bool | None:
        """Whether the answers differ; None if one of them is not whole.

        It takes time by their size, in any thread.
        """
        if not (self.is_whole and other.is_whole):
            return None
        if len(self.tensors) != len(other.tensors) or _joined(self.texts) != _joined(other.texts):
            return True
        return any(map(_differ, self.tensors, other.tensors))


def byte_size(tensor: Tensor) -> int:
    """The size of the data of a tensor, which is not in the memory of a GPU."""
    data = tensor.data
    return sum(map(len, data)) if isinstance(data, tuple) else len(data)


def _differ(one: Tensor, other: Tensor) -> bool:
    if (one.name, one.datatype, one.shape) != (other.name, other.datatype, other.shape):
        return True
    if _equal(one.raw(), other.raw()):
        return False
    if one.datatype not in TOLERANCES:
        return True
    relative, absolute = TOLERANCES[one.datatype]
    found, expected = _sample(one), _sample(other)
    if found.size != expected.size:
        return True
    return not np.allclose(found, expected, relative, absolute, equal_nan=True)


def _equal(one: Buffer, other: Buffer) -> bool:
    """Whether bytes are equal; views compare each byte as an object."""
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def _sample(tensor: Tensor) -> Any:
    """At most MOST_ELEMENTS of the elements, as floats."""
    data = tensor.raw()
    dtype = NUMPY_TYPES.get(tensor.datatype, BF16_BITS)
    values = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    values = values[:: -(-values.size // MOST_ELEMENTS) or 1]
    if tensor.datatype is Datatype.BF16:
        values = bf16_floats(values)
    return values.astype(np.float64)


def _joined(texts: Mapping[str, Sequence[bytes]]) -> dict[str, bytes]:
    return {
        name: b"".join(chain.from_iterable(map(_words, found)) if name == RESPONSE else found)
        for name, found in texts.items()
    }


def _words(text: bytes) -> Iterator[bytes]:
    """The compared members of one of OpenAI's answers; another text as it is."""
    try:
        left = [("", orjson.loads(text))]
    except orjson.JSONDecodeError:
        yield text
        return
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left.extend(reversed(value.items()))
        elif isinstance(value, list):
            left.extend((name, inner) for inner in reversed(value))
        elif name in WORDS and value is not None:
            yield str(value).encode()
