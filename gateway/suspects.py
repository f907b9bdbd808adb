"""Requests that were executing when a process ended, by their content."""

import hashlib
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from gateway.messages import InferRequest
from gateway.tensor import LENGTH_BYTES

ENDS = 2
"""A request is refused after it was executing at the end of this many processes."""
KEPT_SECS = 600.0
MOST = 1024
END_BYTES = 1 << 19
"""Of a larger tensor only the ends are read: all requests at a process are suspects at its end."""
"""Of more suspects the oldest are forgotten."""


@dataclass(slots=True)
class Suspect:
    """The processes that `ended`, the last of them at `seen`; `size` is that of the inputs."""

    size: int
    seen: float = 0.0
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
        self._sizes: set[int] = set()

    def add(self, request: InferRequest, process: Hashable, load: bytes = b"") -> Suspect:
        """Mark a request as a suspect: this process has ended."""
        self._forget_old()
        key = fingerprint(request, load)
        suspect = self.found.pop(key, None) or Suspect(_size(request))
        suspect.seen = self._clock()
        suspect.ended.add(process)
        self.found[key] = suspect  # behind all others: the first one is the oldest
        self._sizes.add(suspect.size)
        if len(self.found) > MOST:
            del self.found[next(iter(self.found))]
        return suspect

    def clear(self, request: InferRequest, load: bytes = b"") -> None:
        """Clear a request: a process has executed it and is alive."""
        if self.find(request, load) is not None:
            del self.found[fingerprint(request, load)]

    def find(self, request: InferRequest, load: bytes = b"") -> Suspect | None:
        """The suspect with the content of a request."""
        self._forget_old()
        # Most requests need not be hashed: no suspect has as many bytes.
        if not self.found or _size(request) not in self._sizes:
            return None
        return self.found.get(fingerprint(request, load))

    def _forget_old(self) -> None:
        oldest = self._clock() - KEPT_SECS
        while self.found and next(iter(self.found.values())).seen <= oldest:
            del self.found[next(iter(self.found))]
        if not self.found:
            self._sizes.clear()


def fingerprint(request: InferRequest, load: bytes) -> bytes:
    """A hash of inputs and parameters, which are all that a suspect is identified by."""
    found = hashlib.blake2b(load, digest_size=16)
    for tensor in request.inputs:
        data = memoryview(tensor.raw())
        found.update(repr((tensor.name, tensor.datatype, tensor.shape, len(data))).encode())
        if len(data) <= 2 * END_BYTES:
            found.update(data)
        else:
            found.update(data[:END_BYTES])
            found.update(data[-END_BYTES:])
    found.update(repr(sorted(request.parameters.items())).encode(errors="surrogatepass"))
    return found.digest()


def _size(request: InferRequest) -> int:
    return sum([_length(tensor.data) for tensor in request.inputs])


def _length(data: Any) -> int:
    if isinstance(data, tuple):
        return sum(map(len, data)) + LENGTH_BYTES * len(data)
    return len(data)
