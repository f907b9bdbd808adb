"""Messages of conversations, and the memory they may take."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

TRIM_BYTES = 32 * 1024 * 1024
"""Bytes of dropped histories after which the heap is trimmed."""


class Age(NamedTuple):
    """The time of a conversation's start, since the epoch, and its remembered turns."""

    began_ns: int
    turns: int


@dataclass(frozen=True, slots=True)
class ByteLimits:
    """Bytes of JSON: messages and answers of one conversation, and of all conversations."""

    each: int = 16 * 1024 * 1024
    total: int = 512 * 1024 * 1024


class MemoryBudget:
    """Counts the bytes of all histories.

    `evict` drops one idle conversation, but not the one it is given; it returns whether it did.
    """

    def __init__(self, limits: ByteLimits, evict: Callable[[object], bool]) -> None:
        self.limits = limits
        self.used = 0
        self._evict = evict
        self._freed = 0

    def make_room(self, size: int, spare: object = None) -> bool:
        """Evict idle conversations until `size` more bytes fit; False if they never do."""
        while self.used + size > self.limits.total:
            if not self._evict(spare):
                return False
        return True

    def book(self, change: int) -> None:
        """Count bytes that a history has more, or less."""
        self.used += change

    def free(self, size: int) -> None:
        """Count a dropped history of that size; trim the heap from time to time."""
        self.book(-size)
        self._freed += size
        if self._freed >= TRIM_BYTES:
            self._freed = 0
            trim_heap()


@dataclass(eq=False)
class History:
    """The messages of a conversation, in JSON and in order.

    `turns` and `byte_size` include turns that wait or run. `tokens` are prompt and completion
    tokens of the latest turn with usage. `cut`: the latest answer did not fit, so no turn may
    follow. `age` grows with each remembered turn, and from one conversation of an id to the next.
    """

    budget: MemoryBudget
    turns: int = 0
    byte_size: int = 0
    tokens: int = 0
    cut: bool = False
    age: Age = field(default_factory=lambda: Age(time.time_ns(), 0))
    _messages: list[bytes] = field(default_factory=list)

    def reserve(self, messages: bytes) -> None:
        """Count an accepted turn and its messages."""
        self.turns += 1
        self._book(len(messages))

    def take_back(self, messages: bytes) -> None:
        """Undo `reserve`: the turn failed, or was cancelled before it began."""
        self.turns -= 1
        self._book(-len(messages))

    def reserve_answer(self, size: int) -> bool:
        """Count bytes of an answer; False if they do not fit."""
        if self.byte_size + size > self.budget.limits.each or not self.budget.make_room(size):
            return False
        self._book(size)
        return True

    def take_back_answer(self, size: int) -> None:
        """Undo `reserve_answer`."""
        self._book(-size)

    def append(self, messages: bytes, answer: str, tokens: int) -> None:
        """Add the messages of a turn, which are reserved already, and its answer."""
        message = _assistant(answer)
        if not self.reserve_answer(len(message)):
            self.cut = True
            return
        self._messages += [messages, message]
        self.age = Age(self.age.began_ns, self.age.turns + 1)
        self.tokens = tokens or self.tokens

    def shorten_answer(self, size: int) -> bool:
        """Cut the latest answer to that many bytes; False if it has no more.

        Its tokens stay counted.
        """
        answer = orjson.loads(self._messages[-1])["content"].encode() if self._messages else b""
        if len(answer) <= size:
            return False
        message = _assistant(answer[:size].decode("utf-8", "ignore"))
        self._book(len(message) - len(self._messages[-1]))
        self._messages[-1] = message
        return True

    def restore(self, messages: bytes, age: Age, tokens: int) -> None:
        """Have the messages of a copy; for a history without any."""
        self.turns, self.age, self.tokens = age.turns, age, tokens
        self._messages.append(messages)
        self._book(len(messages))

    @property
    def messages(self) -> bytes:
        """All remembered messages, without the brackets of their list."""
        return b",".join(self._messages)

    def drop(self) -> None:
        """Forget all messages."""
        self._messages.clear()
        size, self.byte_size = self.byte_size, 0
        self.budget.free(size)

    def followed_by(self, messages: bytes) -> bytes:
        """The JSON list of all messages, followed by these."""
        return b"[%b]" % b",".join([*self._messages, messages])

    def _book(self, change: int) -> None:
        self.byte_size += change
        self.budget.book(change)


def _assistant(answer: str) -> bytes:
    return orjson.dumps({"role": "assistant", "content": answer})


def trim_heap() -> None:
    """Return free memory of glibc's heap to the system; does nothing with other C libraries.

    Dropped histories leave gaps between live objects, and glibc keeps them. Takes about 0.1 ms
    per MB that is returned.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
