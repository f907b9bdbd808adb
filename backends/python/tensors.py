"""Tensors on their way to a worker and back: small ones in the frame, large ones in segments."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from backends.python.worker.sluice_worker.frames import BrokenFrame
from backends.python.worker.sluice_worker.segments import (
    SHARED_FROM_BYTES,
    IncomingSegments,
    OutgoingSegments,
)
from gateway.tensor import Datatype, Tensor

DATATYPES = {datatype.value: datatype for datatype in Datatype}
MUCH_BYTES = 4 << 20
"""Tensors of this size in all are copied into segments beside the event loop."""
INLINE_BYTES = 16 << 20
"""So much of what should be in segments may be in a frame, where there can be no more of them."""

T = TypeVar("T")


class TensorWriter:
    """Describes tensors for a header; `body` collects the bytes of small ones."""

    __slots__ = ("_placed", "_segments", "body")

    def __init__(self, segments: OutgoingSegments) -> None:
        self._segments = segments
        self._placed: list[int] = []
        self.body: list[memoryview] = []

    def write(self, tensor: Tensor) -> list[Any]:
        """`[name, datatype, shape, size, segment]`; OSError if no memory can be shared."""
        data = memoryview(tensor.raw())
        size, segment = data.nbytes, 0
        if size >= SHARED_FROM_BYTES:
            segment = self._place(data)
        elif size:
            self.body.append(data)
        return [tensor.name, tensor.datatype, tensor.shape, size, segment]

    def _place(self, data: memoryview) -> int:
        try:
            segment = self._segments.place(data)
        except OSError:
            # So many are on their way that the worker must take some in first, or no file may be
            # opened: a few tensors can do without.
            if sum([each.nbytes for each in self.body]) + data.nbytes > INLINE_BYTES:
                raise
            self.body.append(data)
            return 0
        self._placed.append(segment)
        return segment

    def give_back(self) -> None:
        """Nobody was told of these tensors."""
        self._segments.freed(self._placed)


class TensorReader:
    """Reads the tensors of one frame, in the order of its header; they are views.

    `segments` are those that the tensors read so far lie in, with `shared_bytes` of them. If one
    cannot be mapped now, the frame can be read again from its beginning, by another reader.
    """

    __slots__ = ("_at", "_body", "_incoming", "segments", "shared_bytes")

    def __init__(self, body: memoryview, incoming: IncomingSegments) -> None:
        self._body = body
        self._incoming = incoming
        self._at = 0
        self.segments: list[int] = []
        self.shared_bytes = 0

    def read(self, described: list[Any]) -> Tensor:
        """The tensor; raises what a broken frame raises, OSError if it cannot be mapped now."""
        name, datatype, shape, size, segment = described
        data = self._view(segment, size) if segment else self._cut(size)
        return Tensor(name, DATATYPES[datatype], tuple(shape), data)

    def _view(self, segment: int, size: int) -> memoryview:
        try:
            data = self._incoming.view(segment, size)
        except OSError:
            self._incoming.forget(self.segments)
            raise
        self.segments.append(segment)
        self.shared_bytes += size
        return data

    def _cut(self, size: int) -> memoryview:
        start = self._at
        self._at = end = start + size
        if end > len(self._body):
            raise BrokenFrame(f"body of {len(self._body)} bytes, expected {end}")
        return self._body[start:end]


async def beside(write: Callable[[], T], tensors: TensorWriter) -> T:
    """Write in a thread; whoever is cancelled meanwhile leaves nothing behind."""
    writing = asyncio.get_running_loop().run_in_executor(None, write)
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(lambda _: tensors.give_back())
        raise
