"""How much may conversations remember, each of them and all of them together?"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.conversations import heap

KEPT_BYTES = 32 * 1024 * 1024
"""What dropped histories may leave in the heap before it is given back."""


@dataclass(frozen=True, slots=True)
class ByteLimits:
    """Bytes of JSON: messages and answers of one conversation, and those of all together."""

    each: int = 16 * 1024 * 1024
    total: int = 512 * 1024 * 1024


class Room:
    """Counts what all histories take. `forget` makes those of a conversation that is idle go.

    It is told who is to be spared, and says whether there was any.
    """

    def __init__(self, limits: ByteLimits, forget: Callable[[object], bool]) -> None:
        self.limits = limits
        self.taken = 0
        self._forget = forget
        self._left = 0

    def make(self, size: int, spare: object = None) -> bool:
        """Whether there is room for so much more, if conversations that are idle have to go."""
        while self.taken + size > self.limits.total:
            if not self._forget(spare):
                return False
        return True

    def book(self, change: int) -> None:
        """A history takes so many bytes more, or less."""
        self.taken += change

    def leave(self, size: int) -> None:
        """A history that took so much is no more."""
        self.book(-size)
        self._left += size
        if self._left >= KEPT_BYTES:
            self._left = 0
            heap.give_back()
