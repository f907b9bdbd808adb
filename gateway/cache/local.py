"""The response cache in this process: the latest used responses, within a number of bytes."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from gateway.cache.cache import Insertion, Lookup, ResponseCache, Tally
from gateway.messages import InferResponse
from gateway.observability.metrics import CacheReading

log = logging.getLogger("sluice.cache")

ENTRY_BYTES = 512
TENSOR_BYTES = 256
"""The size of Python's objects for a response and for each output, without their data."""


class LocalCache(ResponseCache):
    """Holds at most `byte_size` bytes, objects included; evicts the least recently used entry."""

    def __init__(self, byte_size: int) -> None:
        self._byte_size = byte_size
        self._used = 0
        self._entries: OrderedDict[bytes, tuple[InferResponse, int]] = OrderedDict()
        self._tally = Tally()
        self._warned = False

    def look_up(self, key: bytes) -> Lookup:
        began_ns = time.perf_counter_ns()
        found = self._entries.get(key)
        lookup = Lookup()
        if found is None:
            lookup.settle(None)
        else:
            self._entries.move_to_end(key)
            lookup.settle(found[0])
        self._tally.looked_up(time.perf_counter_ns() - began_ns, found=found is not None)
        return lookup

    def insert(
        self, key: bytes, response: InferResponse, done: Callable[[Insertion], None]
    ) -> None:
        began_ns = time.perf_counter_ns()
        outcome = self._insert(key, response)
        self._tally.insertion_ns += time.perf_counter_ns() - began_ns
        done(outcome)

    def reading(self) -> CacheReading:
        return self._tally.reading(len(self._entries), self._used / self._byte_size)

    @property
    def used_bytes(self) -> int:
        """The size of its entries in bytes."""
        return self._used

    def _insert(self, key: bytes, response: InferResponse) -> Insertion:
        if key in self._entries:
            return Insertion.PRESENT
        size = entry_bytes(response)
        if size > self._byte_size:
            self._log_too_large(key, size)
            return Insertion.REFUSED
        while self._used + size > self._byte_size:
            _, (_, freed) = self._entries.popitem(last=False)
            self._used -= freed
            self._tally.evictions += 1
        self._entries[key] = (response, size)
        self._used += size
        return Insertion.KEPT

    def _log_too_large(self, key: bytes, size: int) -> None:
        """Warn once: if one response of a model is too large, most are."""
        log.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "Failed to insert key [%s] into response cache: its %d bytes are more than the size "
            "of the cache, %d",
            key.hex(),
            size,
            self._byte_size,
        )
        self._warned = True


def entry_bytes(response: InferResponse) -> int:
    """The size of an entry in bytes."""
    data = sum(TENSOR_BYTES + len(each.name) + len(each.raw()) for each in response.outputs)
    return ENTRY_BYTES + data + sum(map(_parameter_bytes, response.parameters.items()))


def _parameter_bytes(parameter: tuple[str, object]) -> int:
    name, value = parameter
    return TENSOR_BYTES + len(name) + (len(value) if isinstance(value, str) else 0)
