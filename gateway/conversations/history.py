"""What has been said in a conversation since it began?"""

from dataclasses import dataclass, field

import orjson

from gateway.conversations.memory_budget import Room


@dataclass(eq=False)
class History:
    """Messages in JSON, in their order.

    `turns` and `byte_size` count from when a turn is asked for, unless it comes to nothing.
    `tokens` are those of prompt and completion of the latest turn that told them.
    `cut`: an answer was too long to be remembered, so that nothing can follow it.
    """

    room: Room
    turns: int = 0
    byte_size: int = 0
    tokens: int = 0
    cut: bool = False
    _messages: list[bytes] = field(default_factory=list)

    def reserve(self, messages: bytes) -> None:
        """A turn with these messages has been asked for."""
        self.turns += 1
        self._book(len(messages))

    def take_back(self, messages: bytes) -> None:
        """That turn has come to nothing."""
        self.turns -= 1
        self._book(-len(messages))

    def hear(self, size: int) -> bool:
        """So many bytes more of an answer have come; False if there is no room to keep them."""
        if self.byte_size + size > self.room.limits.each or not self.room.make(size):
            return False
        self._book(size)
        return True

    def unhear(self, size: int) -> None:
        """So many bytes of an answer are not kept after all."""
        self._book(-size)

    def keep(self, messages: bytes, answer: str, tokens: int) -> None:
        """That turn is over, and this was the answer."""
        said = orjson.dumps({"role": "assistant", "content": answer})
        if not self.hear(len(said)):
            self.cut = True
            return
        self._messages += [messages, said]
        self.tokens = tokens or self.tokens

    def drop(self) -> None:
        """Nobody goes on with it."""
        self._messages.clear()
        size, self.byte_size = self.byte_size, 0
        self.room.leave(size)

    def followed_by(self, messages: bytes) -> bytes:
        """The JSON of all messages, with these behind them."""
        return b"[%b]" % b",".join([*self._messages, messages])

    def _book(self, change: int) -> None:
        self.byte_size += change
        self.room.book(change)
