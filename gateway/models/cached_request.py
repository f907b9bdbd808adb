"""Has this request been answered before? If not, its answer is kept for the next one like it."""

import time
from dataclasses import dataclass

from gateway.cache.response_cache import Insertion, ResponseCache, load_key, portable, request_key
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.observability.record import Record
from gateway.schedulers.scheduler import Entry, Scheduler


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The response cache as one load of a model uses it: nobody else has keys like its own."""

    cache: ResponseCache
    key: bytes

    @classmethod
    def of(cls, cache: ResponseCache, name: str, version: str, load: bytes) -> "ModelCache":
        """`load` identifies what was loaded."""
        return cls(cache, load_key(name, version, load))


class CachedRequest:
    """A request whose answer may be there. Implements `StreamRecorder` for the record behind it.

    The answer is looked up when this is made. Kept is the one answer of a request that succeeds,
    as the model gave it.
    """

    __slots__ = (
        "_answer",
        "_answers",
        "_began_ns",
        "_cache",
        "_key",
        "_lookup_ns",
        "_missed",
        "_record",
        "lookup",
    )

    def __init__(self, cache: ModelCache, request: InferRequest) -> None:
        self._began_ns = time.perf_counter_ns()
        self._cache = cache.cache
        self._key = request_key(cache.key, request)
        self.lookup = self._cache.look_up(self._key)
        self._lookup_ns = time.perf_counter_ns() - self._began_ns
        self._record: Record | None = None
        self._missed = False
        self._answers = 0
        self._answer: InferResponse | None = None

    def recorder(self, record: Record) -> "CachedRequest | Record":
        """What is to account for the request's stream."""
        if self.lookup.response is not None:
            return record
        self._record = record
        return self

    def submit(self, entry: Entry, scheduler: Scheduler) -> None:
        """Answer the request once it is known how: from the cache, or through the scheduler.

        If the lookup is settled later than now, a request that the scheduler refuses fails.
        """
        if self.lookup.done:
            self._go_on(entry, scheduler)
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
            self._go_on(entry, scheduler)

    def _go_on(self, entry: Entry, scheduler: Scheduler) -> None:
        answer = self.lookup.response
        if answer is None:
            self._missed = True
            scheduler.submit(entry)
            return
        entry.record.hit(self._lookup_ns)
        scheduler.answered(entry.stream)
        entry.stream.put(answer)

    # StreamRecorder.

    def responded(self, response: InferResponse) -> None:
        """Remember the answer."""
        self._account.responded(response)
        if response.outputs and self._missed:
            self._answers += 1
            self._answer = response

    def taken(self) -> None:
        """Nothing of the cache's concern."""
        self._account.taken()

    def wasted(self, response: InferResponse) -> None:
        """Nothing of the cache's concern."""
        self._account.wasted(response)

    def ended(self, error: InferenceError | None) -> None:
        """Keep the answer of a request that succeeded."""
        self._account.ended(error)
        answer, self._answer = self._answer, None
        if error is None and answer is not None and self._answers == 1:
            began_ns = time.perf_counter_ns()
            self._cache.insert(
                self._key, portable(answer), lambda outcome: self._inserted(began_ns, outcome)
            )

    @property
    def _account(self) -> Record:
        assert self._record is not None  # noqa: S101 - a stream has been made with it
        return self._record

    def _inserted(self, began_ns: int, outcome: Insertion) -> None:
        if outcome is not Insertion.PRESENT:
            self._account.missed(self._lookup_ns + time.perf_counter_ns() - began_ns)
