"""Requests of models with a response cache: look-up, and insertion of the response."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from gateway.cache.cache import (
    Insertion,
    Lookup,
    ResponseCache,
    portable,
    request_key,
)
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse, StreamRecorder, responses_of_texts
from gateway.observability.request_record import Record
from gateway.observability.stream_tap import StreamTap
from gateway.schedulers.execution import Entry
from gateway.schedulers.scheduler import Scheduler
from gateway.tensor import LENGTH_BYTES, Tensor
from gateway.threads import LARGE_BYTES, Threads

log = logging.getLogger("sluice.model")


class Search:
    """The look-up of a request and its key; without a key nothing is found or inserted."""

    __slots__ = ("hashing", "key", "lookup")

    def __init__(
        self, lookup: Lookup, key: bytes = b"", hashing: "asyncio.Future[bytes] | None" = None
    ) -> None:
        self.lookup = lookup
        self.key = key
        self.hashing = hashing

    def cancel(self) -> None:
        """Cancel the computation of the key if it has not begun."""
        if self.hashing is not None:
            self.hashing.cancel()


class ModelCache:
    """The response cache for one load of a model; no other load shares its keys.

    `load` is its `load_key`. The keys of requests with inputs above LARGE_BYTES are computed in
    `threads`. Requests are looked up in the order of the calls.
    """

    def __init__(self, cache: ResponseCache, load: bytes, threads: Threads) -> None:
        self.cache = cache
        self._load = load
        self._threads = threads
        self._waiting: deque[Search] = deque()

    def search(self, request: InferRequest) -> Search:
        """Look up a request. UNAVAILABLE once the threads are closed."""
        if not _is_large(request):
            key = request_key(self._load, request)
            if not self._waiting:
                return Search(self.cache.look_up(key), key)
            search = Search(Lookup(), key)
        else:
            hashing = self._threads.start(request_key, self._load, request)
            hashing.add_done_callback(self._look_up)
            search = Search(Lookup(), hashing=hashing)
        self._waiting.append(search)
        return search

    def _look_up(self, _: object) -> None:
        """Look up the requests at the front whose keys are computed."""
        while self._waiting and (
            self._waiting[0].hashing is None or self._waiting[0].hashing.done()
        ):
            search = self._waiting.popleft()
            if search.hashing is not None:
                search.key = _hashed(search.hashing)
            _settle(search, self.cache.look_up(search.key) if search.key else None)


def _settle(search: Search, found: Lookup | None) -> None:
    if found is None:
        search.lookup.settle(None)
    else:
        found.then(lambda: search.lookup.settle(found.response))


def _hashed(hashing: "asyncio.Future[bytes]") -> bytes:
    """The key; empty if it was not computed."""
    if hashing.cancelled():
        return b""
    error = hashing.exception()
    if error is not None:
        log.error("key of a request not computed", exc_info=error)
        return b""
    return hashing.result()


def _is_large(request: InferRequest) -> bool:
    return sum(map(_size, request.inputs)) > LARGE_BYTES


def _size(tensor: Tensor) -> int:
    """Bytes of the wire form; for many elements at least the bytes of their lengths."""
    size = len(tensor.data)
    if isinstance(tensor.data, tuple):
        size *= LENGTH_BYTES
        size += sum(map(len, tensor.data)) if size <= LARGE_BYTES else 0
    return size


class CachedRequest(StreamTap):
    """A request that the cache may answer. Implements `Interceptor`.

    The look-up begins in the constructor; UNAVAILABLE if the threads are closed. The cache keeps
    the only response of a request that succeeds, as the model returned it.
    """

    __slots__ = (
        "_answer",
        "_answers",
        "_began_ns",
        "_cache",
        "_lookup_ns",
        "_missed",
        "_search",
        "lookup",
    )

    def __init__(self, cache: ModelCache, request: InferRequest) -> None:
        super().__init__(None)
        self._began_ns = time.perf_counter_ns()
        self._cache = cache.cache
        self._search = cache.search(request)
        self.lookup = self._search.lookup
        self._lookup_ns = time.perf_counter_ns() - self._began_ns
        self._missed = False
        self._answers = 0
        self._answer: InferResponse | None = None

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`; of a request that is answered already it is `account` itself."""
        if self.lookup.response is not None:
            return account
        return super().recorder(record, account)

    def submit(self, entry: Entry, scheduler: Scheduler) -> None:
        """Answer the request from the cache, or submit it to the scheduler after a miss.

        A request that the scheduler refuses after a later miss fails.
        """
        if self.lookup.done:
            self._answer_or_submit(entry, scheduler)
        else:
            self.lookup.then(lambda: self._settled(entry, scheduler))

    def _settled(self, entry: Entry, scheduler: Scheduler) -> None:
        self._lookup_ns = time.perf_counter_ns() - self._began_ns
        if entry.stream.done:
            return
        try:
            if self.lookup.missed:
                scheduler.admit(entry.request)
        except InferenceError as error:
            entry.stream.fail(error)
        else:
            self._answer_or_submit(entry, scheduler)

    def _answer_or_submit(self, entry: Entry, scheduler: Scheduler) -> None:
        answer = self.lookup.response
        if answer is None:
            self._missed = True
            scheduler.submit(entry)
            return
        entry.record.hit(self._lookup_ns)
        if scheduler.order is not None:
            scheduler.order.answered(entry.stream)
        entry.stream.put(answer)

    # StreamRecorder.

    def responded(self, response: InferResponse) -> None:
        """Keep the response for insertion."""
        self.account.responded(response)
        if response.outputs and self._missed:
            self._answers += 1
            self._answer = response

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded` of each."""
        for each in responses_of_texts(name, texts, tokens):
            self.responded(each)

    def ended(self, error: InferenceError | None) -> None:
        """Insert the response of a request that succeeded."""
        self._search.cancel()
        self.account.ended(error)
        answer, self._answer = self._answer, None
        key = self._search.key
        if key and error is None and answer is not None and self._answers == 1:
            began_ns = time.perf_counter_ns()
            self._cache.insert(
                key, portable(answer), lambda outcome: self._inserted(began_ns, outcome)
            )

    def _inserted(self, began_ns: int, outcome: Insertion) -> None:
        if outcome is not Insertion.PRESENT:
            self.record.missed(self._lookup_ns + time.perf_counter_ns() - began_ns)
