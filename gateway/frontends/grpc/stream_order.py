"""Order of the requests of one ModelStreamInfer."""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Self


class OrderPosition:
    """One position in an order; exiting its `with` block releases the next position."""

    __slots__ = ("_before", "_key", "_order", "released")

    def __init__(self, order: "StreamOrder", key: Hashable, before: asyncio.Event | None) -> None:
        self.released = asyncio.Event()
        self._order = order
        self._key = key
        self._before = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.released.set()
        self._order.forget(self._key, self)

    async def reached(self) -> None:
        """Wait until all earlier positions are released."""
        if self._before is not None:
            await self._before.wait()


class StreamOrder:
    """FIFO order of the requests of an RPC, separate for each key."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[Hashable, OrderPosition] = {}

    def position(self, key: Hashable) -> OrderPosition:
        """The next position in the order of a key."""
        last = self._last.get(key)
        before = last.released if last is not None else None
        position = self._last[key] = OrderPosition(self, key, before)
        return position

    def forget(self, key: Hashable, position: OrderPosition) -> None:
        """Remove the entry of a key whose last position is released."""
        if self._last.get(key) is position:
            del self._last[key]
