"""The response cache in a Redis server, which many gateways may share."""

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
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.observability.metrics import CacheReading
from gateway.settings import RedisCacheSettings

log = logging.getLogger("sluice.cache")

PREFIX = "sluice:1:"
"""What our keys begin with; the number is that of the encoding of entries."""
PROBE = PREFIX + "probe"
PROBE_SECS = 1.0
"""How often a server that has failed is tried again."""
LOOKUPS_AT_ONCE = 64
PENDING_BYTES = 64 << 20
"""Answers that wait for the server; further ones are not kept."""
NS_PER_SECOND = 1e9
FAILURES = (RedisError, OSError)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    key: str
    lookup: Lookup
    began_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _Offered:
    key: str
    entry: bytes
    began_ns: int
    done: Callable[[Insertion], None]


class RedisCache(ResponseCache):
    """Asks for many keys at once, in the order of the requests, and stores answers beside that.

    A lookup that fails or is late ends all that wait as misses; until the server answers a probe,
    nobody asks it any more. So the server delays each request by the timeout at most.
    """

    shared = True

    def __init__(self, settings: RedisCacheSettings) -> None:
        self._settings = settings
        self._timeout = settings.socket_timeout_ms / 1000 or None
        self._client = _client(settings)
        self._tally = Tally()
        self._asked: deque[_Asked] = deque()
        self._offered: deque[_Offered] = deque()
        self._pending_bytes = 0
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._someone_asked = asyncio.Event()
        self._something_offered = asyncio.Event()
        self._refusing = False

    def look_up(self, key: bytes) -> Lookup:
        lookup = Lookup()
        asked = _Asked(PREFIX + key.hex(), lookup, time.perf_counter_ns())
        if self._up.is_set():
            self._asked.append(asked)
            self._someone_asked.set()
        else:
            self._settle(asked, None)
        return lookup

    def insert(
        self, key: bytes, response: InferResponse, done: Callable[[Insertion], None]
    ) -> None:
        began_ns = time.perf_counter_ns()
        try:
            offered = _Offered(PREFIX + key.hex(), encode(response), began_ns, done)
        except ValueError as error:
            self._refuse(key.hex(), str(error))
            done(Insertion.REFUSED)
            return
        if not self._up.is_set() or self._pending_bytes + len(offered.entry) > PENDING_BYTES:
            done(Insertion.REFUSED)
            return
        self._pending_bytes += len(offered.entry)
        self._offered.append(offered)
        self._something_offered.set()

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
        """Raise unless the server lets us read; longer than a request may wait, it connects."""
        connect = self._settings.connect_timeout_ms / 1000
        unbounded = not connect or self._timeout is None
        async with asyncio.timeout(None if unbounded else connect + (self._timeout or 0)):
            await self._client.mget([PROBE])

    # Lookups.

    async def _answer_lookups(self) -> None:
        while await self._someone_asked.wait():
            if not self._asked:
                self._someone_asked.clear()
                continue
            try:
                await self._answer(tuple(islice(self._asked, LOOKUPS_AT_ONCE)))
            except FAILURES as error:
                self._lost(error)

    async def _answer(self, batch: Sequence[_Asked]) -> None:
        """Settle the first in the queue; raise if the one that waits longest waits too long."""
        async with asyncio.timeout(self._time_left(batch[0])):
            entries = await self._client.mget([each.key for each in batch])
        for asked, entry in zip(batch, entries, strict=True):
            self._asked.popleft()
            self._settle(asked, entry)

    def _time_left(self, asked: _Asked) -> float | None:
        if self._timeout is None:
            return None
        waited_ns = time.perf_counter_ns() - asked.began_ns
        return max(0.0, self._timeout - waited_ns / NS_PER_SECOND)

    def _settle(self, asked: _Asked, entry: bytes | str | None) -> None:
        response: InferResponse | None = None
        try:
            response = decode(entry) if isinstance(entry, bytes) else None
        except ValueError as error:
            log.warning("entry %s of the response cache is damaged: %s", asked.key, error)
        spent_ns = time.perf_counter_ns() - asked.began_ns
        self._tally.looked_up(spent_ns, found=response is not None)
        asked.lookup.settle(response)

    def _settle_all(self) -> None:
        """Nothing is found, and nothing kept, of all that waits."""
        self._up.clear()
        while self._asked:
            self._settle(self._asked.popleft(), None)
        while self._offered:
            self._finish(self._offered.popleft(), Insertion.REFUSED)

    # When the server is gone.

    def _lost(self, error: Exception) -> None:
        if self._up.is_set():
            log.error(
                "redis does not answer: requests go on without the response cache",
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
            log.info("redis answers again", extra={"host": self._settings.host})

    # Insertions.

    async def _store(self) -> None:
        while await self._something_offered.wait():
            if not self._offered:
                self._something_offered.clear()
                continue
            offered = self._offered.popleft()
            try:
                self._finish(offered, await self._set(offered))
            except BaseException:
                self._finish(offered, Insertion.REFUSED)
                raise

    async def _set(self, offered: _Offered) -> Insertion:
        try:
            async with asyncio.timeout(self._timeout):
                kept = await self._client.set(offered.key, offered.entry, nx=True)
        except FAILURES as error:
            self._refuse(offered.key, _reason(error))
            return Insertion.REFUSED
        self._refusing = False
        return Insertion.KEPT if kept else Insertion.PRESENT

    def _finish(self, offered: _Offered, outcome: Insertion) -> None:
        self._pending_bytes -= len(offered.entry)
        self._tally.insertion_ns += time.perf_counter_ns() - offered.began_ns
        offered.done(outcome)

    def _refuse(self, key: str, reason: str) -> None:
        """Warn of the first of a row."""
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
    """A client that tries once; whoever uses it says how long it may take."""
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
