"""The response cache: its interface, keys and encoding, and the cache in this process."""

import hashlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from gateway.messages import InferRequest, InferResponse
from gateway.observability.statistics import CacheReading
from gateway.tensor import SIZES, Datatype, Tensor

KEY_BYTES = 32
LENGTH_BYTES = 8
NS_PER_US = 1000

log = logging.getLogger("sluice.cache")

ENTRY_BYTES = 512
TENSOR_BYTES = 256
"""The size of Python's objects for a response and for each output, without their data."""


class Insertion(Enum):
    """The outcome of an insertion."""

    KEPT = auto()
    PRESENT = auto()
    """The key exists: an equal request was answered in the meantime."""
    REFUSED = auto()
    """The response does not fit, or the cache failed; the cache logs the reason."""


class Lookup:
    """A lookup of a response; the cache settles it once, at once or later."""

    __slots__ = ("_then", "done", "response")

    def __init__(self) -> None:
        self.done = False
        self.response: InferResponse | None = None
        self._then: Callable[[], None] | None = None

    @property
    def missed(self) -> bool:
        """Whether the lookup is settled without a response."""
        return self.done and self.response is None

    def settle(self, response: InferResponse | None) -> None:
        """Set the response, None for a miss; a second call has no effect."""
        if self.done:
            return
        self.done, self.response = True, response
        if self._then is not None:
            self._then()

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the lookup is settled; at once if it is."""
        if self.done:
            callback()
        else:
            self._then = callback


class ResponseCache(ABC):
    """Keeps responses by key. A failure counts as a miss: it is logged, and never raised.

    `shared`: other processes use the entries, or they outlive this process.
    """

    shared = False

    @abstractmethod
    def look_up(self, key: bytes) -> Lookup:
        """Look a response up; lookups are settled in the order of the calls."""

    @abstractmethod
    def insert(
        self, key: bytes, response: InferResponse, done: Callable[[Insertion], None]
    ) -> None:
        """Keep a `portable` response; `done` is called once, at once or later."""

    @abstractmethod
    def reading(self) -> CacheReading:
        """The values for metrics."""

    async def connect(self) -> None:  # noqa: B027 - a local cache needs no connection
        """Prepare the cache, before any other call; InferenceError if it fails."""

    async def run(self) -> None:  # noqa: B027 - a local cache needs no task
        """Serve lookups and insertions until cancelled."""


@dataclass(slots=True)
class Tally:
    """The counts of a cache."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0

    def looked_up(self, ns: int, *, found: bool) -> None:
        """Count a lookup."""
        self.hits += found
        self.misses += not found
        self.lookup_ns += ns

    def reading(self, entries: int | None = None, utilization: float | None = None) -> CacheReading:
        """The values for metrics; None for unknown ones."""
        return CacheReading(
            utilization=utilization,
            entries=entries,
            lookups=self.hits + self.misses,
            hits=self.hits,
            misses=self.misses,
            evictions=None if entries is None else self.evictions,
            lookup_us=self.lookup_ns // NS_PER_US,
            insertion_us=self.insertion_ns // NS_PER_US,
        )


# Keys.


def load_key(name: str, version: str, load: bytes) -> bytes:
    """The first part of the keys of one load of a model; `load` identifies that load."""
    return _digest((name.encode("utf-8", "surrogateescape"), version.encode(), load))


def request_key(load: bytes, request: InferRequest) -> bytes:
    """The key of a request; two keys are equal only if the model cannot tell the requests apart.

    It covers name, datatype, shape and bytes of every input in any order, the requested outputs,
    the client's own parameters, and its tenant, since a hit shows that the request was made before.
    Triton's key covers names and bytes of inputs only.
    """
    return _digest(_parts(load, request))


def _parts(load: bytes, request: InferRequest) -> Iterable[Any]:
    asked = [output.name for output in request.outputs]
    parameters = sorted(request.parameters.items())
    inputs = sorted(request.inputs, key=_name)
    about = [(each.name, each.datatype.value, each.shape) for each in inputs]
    yield load
    if request.caller is not None:
        yield request.caller.tenant.encode()
    yield repr((about, asked, parameters)).encode("utf-8", "surrogatepass")
    for each in inputs:
        yield each.raw()


def _name(tensor: Tensor) -> str:
    return tensor.name


def _digest(parts: Iterable[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        view = memoryview(part)
        digest.update(view.nbytes.to_bytes(LENGTH_BYTES, "little"))
        digest.update(view)
    return digest.digest()


# Responses.


def portable(response: InferResponse) -> InferResponse:
    """The response with memory of its own, and without the data of its request.

    It has no usage: its tokens were made once.
    """
    outputs = tuple(
        Tensor(each.name, each.datatype, each.shape, bytes(each.raw())) for each in response.outputs
    )
    return InferResponse(outputs=outputs, parameters=dict(response.parameters), final=True)


def encode(response: InferResponse) -> bytes:
    """A portable response as bytes: the length of a JSON header, the header, the outputs' data.

    ValueError if a backend set a parameter of a type that the protocol lacks.
    """
    outputs = [
        (each.name, each.datatype.value, [int(dim) for dim in each.shape], len(each.raw()))
        for each in response.outputs
    ]
    try:
        header = json.dumps([outputs, dict(response.parameters)]).encode()
    except TypeError as error:
        raise ValueError(str(error)) from None
    data = (each.raw() for each in response.outputs)
    return b"".join((len(header).to_bytes(LENGTH_BYTES, "little"), header, *data))


def decode(entry: bytes) -> InferResponse:
    """The response in an entry; ValueError if the entry is damaged."""
    start = LENGTH_BYTES + int.from_bytes(entry[:LENGTH_BYTES], "little")
    try:
        described, parameters = json.loads(entry[LENGTH_BYTES:start])
        outputs = []
        for name, datatype, shape, size in described:
            data = entry[start : start + size]
            outputs.append(Tensor(str(name), Datatype(datatype), tuple(map(int, shape)), data))
            _check_size(outputs[-1], size)
            start += size
        response = InferResponse(outputs=tuple(outputs), parameters=dict(parameters), final=True)
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if start != len(entry):
        raise ValueError(f"{len(entry)} bytes, expected {start}")
    return response


def _check_size(tensor: Tensor, size: int) -> None:
    element = SIZES.get(tensor.datatype)
    expected = size if element is None else tensor.count * element
    if not len(tensor.raw()) == size == expected:
        raise ValueError(f"output '{tensor.name}' has {size} bytes, expected {expected}")


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
