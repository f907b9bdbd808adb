"""Memo of decoded requests, for the frontends: clients repeat a request with other data."""

from typing import TypeVar

MOST_KNOWN = 256
MOST_BYTES = 4096
"""Longest key that frontends add; decoding a longer one is short in comparison with its data."""

Key = TypeVar("Key")
Entry = TypeVar("Entry")


class RequestMemo(dict[Key, Entry]):
    """The latest decoded requests, by the parts that clients repeat.

    A new key of a full memo evicts the oldest one. Look-ups are those of `dict`, without a call of
    ours.
    """

    def __setitem__(self, key: Key, entry: Entry) -> None:
        if len(self) >= MOST_KNOWN and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, entry)
