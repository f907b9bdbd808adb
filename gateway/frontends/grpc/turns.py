"""The order of answers on one RPC of ModelStreamInfer."""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Self


class Turn:
    """One place in an order; leaving the `with` block ends it, and the next place comes."""

    __slots__ = ("_before", "_key", "_order", "over")

    def __init__(self, order: "Order", key: Hashable, before: asyncio.Event | None) -> None:
        self.over = asyncio.Event()
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
        self.over.set()
        self._order.forget(self._key, self)

    async def come(self) -> None:
        """Wait until the place before this one is over, and so every earlier one."""
        if self._before is not None:
            await self._before.wait()


class Order:
    """The places of an RPC: one row for each key, first come, first served."""

    def __init__(self) -> None:
        self._last: dict[Hashable, Turn] = {}

    def turn(self, key: Hashable) -> Turn:
        """The next place in the row of a key."""
        last = self._last.get(key)
        turn = self._last[key] = Turn(self, key, last.over if last is not None else None)
        return turn

    def forget(self, key: Hashable, turn: Turn) -> None:
        """Drop a row whose last place is over."""
        if self._last.get(key) is turn:
            del self._last[key]
