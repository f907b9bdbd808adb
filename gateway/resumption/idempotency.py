"""Idempotency keys, and the fingerprints of their requests."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors import Code, InferenceError
from gateway.tensor import Buffer

MAX_KEY = 255
DIGEST_BYTES = 32
LENGTH_BYTES = 8


class KeyReused(InferenceError):
    """The key was used for another request; over HTTP the status is 422."""

    def __init__(self) -> None:
        super().__init__(
            Code.INVALID_ARG,
            "this Idempotency-Key has been used for a request to another route or with another "
            "body; use a new key for a new request",
        )


@dataclass(frozen=True, slots=True)
class Key:
    """A client's name for a request, and a cryptographic hash of the request."""

    name: str
    fingerprint: bytes

    @classmethod
    def of(cls, name: str, route: str, parts: Iterable[Buffer]) -> "Key":
        """The key of a request with a body of `parts`.

        INVALID_ARG if the name is empty or longer than MAX_KEY characters (Idempotency-Key HTTP
        header field, draft 06: the server limits its length).
        """
        if not 0 < len(name) <= MAX_KEY:
            raise InferenceError(
                Code.INVALID_ARG,
                f"the Idempotency-Key has {len(name)} characters, expected 1 to {MAX_KEY}",
            )
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in (route.encode("utf-8", "surrogateescape"), *parts):
            view = memoryview(part)
            digest.update(view.nbytes.to_bytes(LENGTH_BYTES, "little"))
            digest.update(view)
        return cls(name, digest.digest())
