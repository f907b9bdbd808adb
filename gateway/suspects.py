"""Requests that were executing when a process ended, by their content."""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from gateway.messages import InferRequest
from gateway.policy.caller import tenant_of
from gateway.tensor import LENGTH_BYTES

ENDS = 2
"""A request is refused after it was executing at the end of this many processes."""
KEPT_SECS = 600.0
MOST = 1024
"""Of more suspects the oldest are forgotten, first of all those that are not refused."""
KEY_BYTES = 16
"""The bytes of a fingerprint."""
SAMPLES, SAMPLE_BYTES = 1024, 1024
"""A larger tensor is read in samples at equal distances: to hash all its bytes would block others.

All requests at a process are suspects at its end.
"""


@dataclass(slots=True)
class Suspect:
    """The processes that `ended`, the last of them at `seen`.

    `key` is its fingerprint, `size` that of the inputs.
    """

    key: bytes
    size: int
    seen: float = -math.inf
    ended: set[Hashable] = field(default_factory=set)

    @property
    def is_refused(self) -> bool:
        """Whether it is not executed again."""
        return len(self.ended) >= ENDS


class Suspects:
    """Suspects by their content, for ten minutes after the last process that they ended.

    `load` is a text that the fingerprint includes, such as the state of a model's files.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.found: dict[bytes, Suspect] = {}
        self._sizes: Counter[int] = Counter()

    def add(self, request: InferRequest, process: Hashable, load: bytes = b"") -> Suspect:
        """Mark a request as a suspect: this process has ended."""
        return self.mark(fingerprint(request, load), _size(request), process)

    def mark(self, key: bytes, size: int, process: Hashable, age_secs: float = 0.0) -> Suspect:
        """Mark a request as a suspect by its fingerprint: this process ended some time ago."""
        suspect = self.get(key) or Suspect(key, size)
        self.remove(key)
        suspect.seen = max(suspect.seen, self._clock() - age_secs)
        suspect.ended.add(process)
        if len(self.found) >= MOST:
            self._forget_old()
        if len(self.found) >= MOST:
            lesser = (each.key for each in self.found.values() if not each.is_refused)
            self.remove(next(lesser, next(iter(self.found))))
        self.found[key] = suspect
        self._sizes[suspect.size] += 1
        return suspect

    def get(self, key: bytes) -> Suspect | None:
        """The suspect of a fingerprint."""
        suspect = self.found.get(key)
        return None if suspect is None or self.age_secs(suspect) >= KEPT_SECS else suspect

    def clear(self, request: InferRequest, load: bytes = b"") -> Suspect | None:
        """Clear a request: a process has executed it and is alive. The suspect that it was."""
        suspect = self.find(request, load)
        return None if suspect is None else self.remove(suspect.key)

    def find(self, request: InferRequest, load: bytes = b"") -> Suspect | None:
        """The suspect with the content of a request."""
        self._forget_old()
        # Most requests need not be hashed: no suspect has as many bytes.
        if not self.found or not self._sizes[_size(request)]:
            return None
        return self.get(fingerprint(request, load))

    def remove(self, key: bytes) -> Suspect | None:
        """Clear a request by its fingerprint; the suspect that it was."""
        suspect = self.found.pop(key, None)
        if suspect is not None:
            self._sizes[suspect.size] -= 1
            if not self._sizes[suspect.size]:
                del self._sizes[suspect.size]
        return suspect

    def age_secs(self, suspect: Suspect) -> float:
        """The time since its last process ended."""
        return self._clock() - suspect.seen

    def _forget_old(self) -> None:
        """Forget old ones up to the first that is not.

        An old one behind it came with an age: to sort the table would block others.
        """
        oldest = self._clock() - KEPT_SECS
        while self.found and next(iter(self.found.values())).seen <= oldest:
            self.remove(next(iter(self.found)))


def fingerprint(request: InferRequest, load: bytes) -> bytes:
    """A hash of tenant, inputs and parameters, which are all that a suspect is identified by."""
    found = hashlib.blake2b(load, digest_size=KEY_BYTES)
    found.update(repr(tenant_of(request.caller)).encode())
    for tensor in request.inputs:
        data = memoryview(tensor.raw())
        found.update(repr((tensor.name, tensor.datatype, tensor.shape, len(data))).encode())
        if len(data) <= SAMPLES * SAMPLE_BYTES:
            found.update(data)
        else:
            for start in range(0, len(data), len(data) // SAMPLES):
                found.update(data[start : start + SAMPLE_BYTES])
            found.update(data[-SAMPLE_BYTES:])
    found.update(repr(sorted(request.parameters.items())).encode(errors="surrogatepass"))
    return found.digest()


def _size(request: InferRequest) -> int:
    return sum([_length(tensor.data) for tensor in request.inputs])


def _length(data: Any) -> int:
    if isinstance(data, tuple):
        return sum(map(len, data)) + LENGTH_BYTES * len(data)
    return len(data)
