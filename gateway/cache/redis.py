"""The response cache in a Redis server, which several gateways may share."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from gateway.cache.cache import Insertion, Lookup, ResponseCache, Tally, decode, encode
from gateway.cache_settings import RedisCacheSettings
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.observability.statistics import CacheReading

log = logging.getLogger("sluice.cache")

PREFIX = "sluice:1:"
"""The prefix of all keys; the number is the version of the encoding of entries."""
PROBE = PREFIX + "probe"
PROBE_SECS = 1.0
"""Seconds between probes of a server that has failed."""
LOOKUPS_AT_ONCE = 64
PENDING_BYTES = 64 << 20
"""Bytes of responses that wait for the server; further responses are not kept."""
NS_PER_SECOND = 1e9
FAILURES = (RedisError, OSError)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingLookup:
    key: str
    lookup: Lookup
    began_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _PendingInsertion:
    key: str
    entry: bytes
    began_ns: int
    done: Callable[[Insertion], None]


class RedisCache(ResponseCache):
    """Looks many keys up at once, in the order of the requests, and inserts concurrently.

    A lookup that fails or times out ends all waiting lookups as misses. Then every lookup misses
    until the server answers a probe. So the server delays each request by at most the timeout.
    """

    shared = True

    def __init__(self, settings: RedisCacheSettings) -> None:
        self._settings = settings
        self._timeout = settings.socket_timeout_ms / 1000 or None
        self._client = _client(settings)
        self._tally = Tally()
        self._lookups: deque[_PendingLookup] = deque()
        self._insertions: deque[_PendingInsertion] = deque()
        self._pending_bytes = 0
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._has_lookups = asyncio.Event()
        self._has_insertions = asyncio.Event()
        self._refusing = False

    def look_up(self, key: bytes) -> Lookup:
        lookup = Lookup()
        pending = _PendingLookup(PREFIX + key.hex(), lookup, time.perf_counter_ns())
        if self._up.is_set():
            self._lookups.append(pending)
            self._has_lookups.set()
        else:
            self._settle(pending, None)
        return lookup

    def insert(
        self, key: bytes, response: InferResponse, done: Callable[[Insertion], None]
    ) -> None:
        began_ns = time.perf_counter_ns()
        try:
            pending = _PendingInsertion(PREFIX + key.hex(), encode(response), began_ns, done)
        except ValueError as error:
            self._refuse(key.hex(), str(error))
            done(Insertion.REFUSED)
            return
        if not self._up.is_set() or self._pending_bytes + len(pending.entry) > PENDING_BYTES:
            done(Insertion.REFUSED)
            return
        self._pending_bytes += len(pending.entry)
        self._insertions.append(pending)
        self._has_insertions.set()

    def reading(self) -> CacheReading:
        return self._tally.reading()

    async def connect(self) -> None:
        settings = self._settings
        try:
            await self._probe()
        except (*FAILURES, ValueError) as error:
            await self._client.aclose()
            raise InferenceError(
                Code.INTERNAL,
                f"Failed to initialize RedisCache: Failed to connect to Redis at "
                f"{settings.host}:{settings.port}: {_reason(error)}",
            ) from None
        self._up.set()
        log.info("redis connected", extra={"host": settings.host, "port": settings.port})

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for loop in (self._answer_lookups(), self._store(), self._recover()):
                    tasks.create_task(loop)
        finally:
            self._settle_all()
            await self._client.aclose()

    async def _probe(self) -> None:
        """Raise unless the server answers a read; the time limit includes connecting."""
        connect = self._settings.connect_timeout_ms / 1000
        unbounded = not connect or self._timeout is None
        async with asyncio.timeout(None if unbounded else connect + (self._timeout or 0)):
            await self._client.mget([PROBE])

    # Lookups.

    async def _answer_lookups(self) -> None:
        while await self._has_lookups.wait():
            if not self._lookups:
                self._has_lookups.clear()
                continue
            try:
                await self._answer(tuple(islice(self._lookups, LOOKUPS_AT_ONCE)))
            except FAILURES as error:
                self._disconnected(error)

    async def _answer(self, batch: Sequence[_PendingLookup]) -> None:
        """Settle the first lookups of the queue; raise if the oldest times out."""
        async with asyncio.timeout(self._time_left(batch[0])):
            entries = await self._client.mget([each.key for each in batch])
        for pending, entry in zip(batch, entries, strict=True):
            self._lookups.popleft()
            self._settle(pending, entry)

    def _time_left(self, pending: _PendingLookup) -> float | None:
        if self._timeout is None:
            return None
        waited_ns = time.perf_counter_ns() - pending.began_ns
        return max(0.0, self._timeout - waited_ns / NS_PER_SECOND)

    def _settle(self, pending: _PendingLookup, entry: bytes | str | None) -> None:
        response: InferResponse | None = None
        try:
            response = decode(entry) if isinstance(entry, bytes) else None
        except ValueError as error:
            log.warning("entry %s of the response cache is damaged: %s", pending.key, error)
        spent_ns = time.perf_counter_ns() - pending.began_ns
        self._tally.looked_up(spent_ns, found=response is not None)
        pending.lookup.settle(response)

    def _settle_all(self) -> None:
        """End all waiting lookups as misses, and all waiting insertions as refused."""
        self._up.clear()
        while self._lookups:
            self._settle(self._lookups.popleft(), None)
        while self._insertions:
            self._finish(self._insertions.popleft(), Insertion.REFUSED)

    # Failures of the server.

    def _disconnected(self, error: Exception) -> None:
        if self._up.is_set():
            log.error(
                "redis does not answer: lookups of the response cache miss",
                extra={"host": self._settings.host, "reason": _reason(error)},
            )
        self._settle_all()
        self._down.set()

    async def _recover(self) -> None:
        while await self._down.wait():
            await asyncio.sleep(PROBE_SECS)
            try:
                await self._probe()
            except FAILURES:
                continue
            self._down.clear()
            self._up.set()
            log.info("redis reconnected", extra={"host": self._settings.host})

    # Insertions.

    async def _store(self) -> None:
        while await self._has_insertions.wait():
            if not self._insertions:
                self._has_insertions.clear()
                continue
            pending = self._insertions.popleft()
            try:
                self._finish(pending, await self._set(pending))
            except BaseException:
                self._finish(pending, Insertion.REFUSED)
                raise

    async def _set(self, pending: _PendingInsertion) -> Insertion:
        try:
            async with asyncio.timeout(self._timeout):
                kept = await self._client.set(pending.key, pending.entry, nx=True)
        except FAILURES as error:
            self._refuse(pending.key, _reason(error))
            return Insertion.REFUSED
        self._refusing = False
        return Insertion.KEPT if kept else Insertion.PRESENT

    def _finish(self, pending: _PendingInsertion, outcome: Insertion) -> None:
        self._pending_bytes -= len(pending.entry)
        self._tally.insertion_ns += time.perf_counter_ns() - pending.began_ns
        pending.done(outcome)

    def _refuse(self, key: str, reason: str) -> None:
        """Log a refused insertion; warn about the first in a row."""
        log.log(
            logging.DEBUG if self._refusing else logging.WARNING,
            "Failed to insert key [%s] into response cache: %s",
            key,
            reason,
        )
        self._refusing = True


def _reason(error: Exception) -> str:
    if isinstance(error, ResponseError):
        return str(error)
    return str(error) or "no answer in time"


def _client(settings: RedisCacheSettings) -> Redis:
    """A client without retries and without a time limit; callers set the limit."""
    return Redis(
        host=settings.host,
        port=settings.port,
        db=settings.db,
        username=settings.user or None,
        password=settings.password or None,
        socket_timeout=None,
        socket_connect_timeout=settings.connect_timeout_ms / 1000 or None,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        ssl=settings.tls,
        ssl_certfile=settings.cert or None,
        ssl_keyfile=settings.key or None,
        ssl_ca_certs=settings.cacert or None,
        ssl_ca_path=settings.cacert_dir or None,
    )
