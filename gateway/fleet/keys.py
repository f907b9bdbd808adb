"""Keys of prompts and pins.

A key is the hash of all of a prompt up to the end of one of its pieces, so that equal keys mean
equal beginnings. A pin is the key of a state at one place: a conversation or an open sequence.
"""

import heapq
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from gateway.tensor import Buffer

KEY_BYTES = 8
PIECE_BYTES = 1024
"""The bytes of a prompt for each key: about 256 tokens.

A key is announced twice, once gained and once lost: that is 1.6 % of the bytes of new prompts.
"""
MOST_KEYS_OF_PROMPT = 1024
MOST_KEYED_BYTES = MOST_KEYS_OF_PROMPT * PIECE_BYTES
"""Of a longer prompt the first MiB has keys: the keys of 128 KiB take a third of a millisecond."""
SECRET_BYTES = 32
"""The length of the shortest secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixScope:
    """The parts of a request that must be equal for a prefix to be shared."""

    model: str
    version: str
    adapter: str = ""
    cache_salt: str = ""
    tenant: str = ""

    def parts(self) -> tuple[str, ...]:
        """All fields in their order."""
        return (self.model, self.version, self.adapter, self.cache_salt, self.tenant)


class PromptKeys:
    """Keys of prompts and pins of one fleet; without its secret a client cannot aim at collisions.

    Keys of a prompt are a prefix of those of its continuation. An incomplete last piece has none.
    """

    def __init__(self, secret: bytes) -> None:
        if (size := len(secret)) < SECRET_BYTES:
            expected = f"{SECRET_BYTES} or more"
            raise ValueError(f"the secret of the fleet has {size} bytes, expected {expected}")
        hidden = blake2b(secret, digest_size=16, person=b"sluice prefixes").digest()
        # `person` and `salt` are parameters: they add no block to a piece, as a `key` would.
        self._hash = partial(blake2b, digest_size=KEY_BYTES, person=hidden)

    def of_messages(
        self, scope: PrefixScope, tools: bytes, messages: Iterable[bytes]
    ) -> tuple[bytes, ...]:
        """The keys of a chat: its tools, then each message as the client wrote it."""
        return self._chain(scope, b"messages", _pieces(b"\0".join((tools, *messages))))

    def of_text(self, scope: PrefixScope, text: str) -> tuple[bytes, ...]:
        """The keys of a text."""
        prompt = text[:MOST_KEYED_BYTES].encode(errors="surrogatepass")
        return self._chain(scope, b"text", _pieces(prompt))

    def of_tokens(self, scope: PrefixScope, ids: Sequence[int]) -> tuple[bytes, ...]:
        """The keys of token ids, as int32; ValueError if one is none."""
        ids = ids[: MOST_KEYED_BYTES // 4]
        try:
            return self._chain(scope, b"tokens", _pieces_of_tokens(ids))
        except struct.error:
            raise ValueError("a token id is no 32-bit integer") from None

    def of_pin(self, kind: str, model: str, name: str) -> bytes:
        """The key of a conversation or a sequence."""
        return self._hash(_framed((kind, model, name)), salt=b"pin").digest()

    def _chain(
        self, scope: PrefixScope, kind: bytes, pieces: Iterable[Buffer]
    ) -> tuple[bytes, ...]:
        keyed, keys = self._hash, []
        key = keyed(_framed(scope.parts()), salt=kind).digest()
        for piece in pieces:
            key = keyed(piece, salt=key).digest()
            keys.append(key)
        return tuple(keys)


def _pieces(prompt: bytes) -> Iterator[Buffer]:
    """The complete pieces of a prompt."""
    view, end = memoryview(prompt), min(len(prompt), MOST_KEYED_BYTES) - PIECE_BYTES
    return (view[start : start + PIECE_BYTES] for start in range(0, end + 1, PIECE_BYTES))


def _pieces_of_tokens(ids: Sequence[int]) -> Iterator[Buffer]:
    """The complete pieces of token ids; struct.error, at the latest after them, for other values.

    Piece by piece: all ids in one call take a third longer.
    """
    length = PIECE_BYTES // 4
    pack, end = struct.Struct(f"<{length}i").pack, len(ids) // length * length
    for start in range(0, end, length):
        yield pack(*ids[start : start + length])
    struct.pack(f"<{len(ids) - end}i", *ids[end:])


def _framed(fields: Iterable[str]) -> bytes:
    """Fields with their lengths, so that no other fields have the same bytes."""
    encoded = [field.encode(errors="surrogatepass") for field in fields]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def rendezvous(key: bytes, replica_ids: Iterable[str]) -> Sequence[str]:
    """The replica of a pin that none has announced, and the runner-up; fewer if there are fewer.

    Every router finds the same two. If a replica ends, only its own keys change their place.
    """
    weights = [(blake2b(key + each.encode(), digest_size=8).digest(), each) for each in replica_ids]
    return [name for _, name in heapq.nlargest(2, weights)]
