"""One loaded version of a model: what serves its requests, and what keeps it serving."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models.validation import RequestRules
from gateway.observability.statistics import ModelStatistics, Record
from gateway.schedulers.choice import build_scheduler
from gateway.schedulers.scheduler import Entry
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.model")

DEFAULT_MAX_IN_FLIGHT = 1024
DEFAULT_RESTART_TRIES = 3
FIRST_BACKOFF_SECS = 0.5
STABLE_SECS = 60.0
"""An instance that lived this long starts its tries anew."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model's config says of load and of restarts, in its `parameters`.

    `max_in_flight`: requests accepted and not yet ended. `restart_tries`: how often an instance
    that died is loaded again before the model stays unavailable.
    """

    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    restart_tries: int = DEFAULT_RESTART_TRIES

    @classmethod
    def read(cls, config: ModelConfig) -> "Limits":
        """The limits of a config; InferenceError names a value that is no number."""
        return cls(
            max_in_flight=_number(config, "max_in_flight", DEFAULT_MAX_IN_FLIGHT, least=1),
            restart_tries=_number(config, "restart_tries", DEFAULT_RESTART_TRIES, least=0),
        )


def _number(config: ModelConfig, key: str, default: int, least: int) -> int:
    text = config.parameters.get(key, str(default))
    if not text.isdecimal() or int(text) < least:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{config.name}': parameter '{key}' is '{text}', expected a number of at "
            f"least {least}",
        )
    return int(text)


def backoff_secs(tries: int) -> float:
    """How long a restart waits after that many tries before it."""
    return FIRST_BACKOFF_SECS * 2.0**tries


class Model:
    """A loaded version: its config, instances, scheduler, statistics and requests in flight.

    `load` makes another instance when one has died. One task runs `run`; `close` comes after it.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: ModelStatistics,
        instances: Sequence[Instance],
        load: Callable[[], Awaitable[Instance]],
    ) -> None:
        self.config = config
        self.version = str(version)
        self.statistics = statistics
        self._instances = list(instances)
        self._scheduler = build_scheduler(config, statistics)
        self._load = load
        self._limits = Limits.read(config)
        self._rules = RequestRules(config)
        self._streams: dict[Record, ResponseStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._trouble = ""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.name

    @property
    def ready(self) -> bool:
        """Whether an instance is alive."""
        return bool(self._instances)

    @property
    def trouble(self) -> str:
        """Why it is not ready; empty when it is."""
        return "" if self.ready else self._trouble

    @property
    def in_flight(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._streams)

    @property
    def instances(self) -> Iterable[Instance]:
        """The instances that are alive."""
        return tuple(self._instances)

    def submit(self, request: InferRequest) -> ResponseStream:
        """Check a request and hand it to the scheduler, in one plain step.

        Raises InferenceError: INVALID_ARG from validation, UNAVAILABLE when no instance is alive
        or the limit of requests in flight is reached.
        """
        batch_size = self._rules.check(request)
        self._refuse_if_unable()
        self._scheduler.admit(request)
        record = Record(self.statistics, batch_size, request.received_ns, self._left)
        stream = ResponseStream(record)
        self._streams[record] = stream
        self._idle.clear()
        self._scheduler.submit(Entry(request, stream, record))
        return stream

    async def run(self, on_change: Callable[[], None]) -> None:
        """Run the scheduler, and load again what dies, until cancelled.

        `on_change` is called whenever `ready` may have changed.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scheduler.run())
            for instance in self._instances:
                self._scheduler.add(instance)
                tasks.create_task(self._keep(instance, on_change))

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def abandon(self, error: InferenceError) -> None:
        """End every request in flight with an error."""
        for stream in tuple(self._streams.values()):
            stream.abandon(error)

    async def close(self) -> None:
        """Release the instances; what is still in flight or queued ends with an error."""
        self.abandon(InferenceError(Code.UNAVAILABLE, f"model '{self.name}' is being closed"))
        while self._instances:
            await self._release(self._instances.pop())

    def _refuse_if_unable(self) -> None:
        if not self._instances:
            raise InferenceError(
                Code.UNAVAILABLE, f"model '{self.name}' is unavailable: {self._trouble}"
            )
        limit = self._limits.max_in_flight
        if len(self._streams) >= limit:
            self.statistics.rejected()
            raise InferenceError(
                Code.UNAVAILABLE,
                f"model '{self.name}' has {limit} requests in flight, the most it accepts "
                "(its parameter 'max_in_flight'); retry later",
            )

    def _left(self, record: Record) -> None:
        del self._streams[record]
        if not self._streams:
            self._idle.set()

    async def _keep(self, instance: Instance, on_change: Callable[[], None]) -> None:
        tries = 0
        while True:
            began = time.monotonic()
            reason = await instance.died()
            tries = 0 if time.monotonic() - began > STABLE_SECS else tries
            self._lose(instance, reason)
            on_change()
            await self._release(instance)
            while (replacement := await self._replace(tries, reason)) is None:
                tries += 1
            instance, tries = replacement, tries + 1
            self._instances.append(instance)
            self._scheduler.add(instance)
            on_change()

    def _lose(self, instance: Instance, reason: str) -> None:
        log.error("instance died", extra={"model": self.name, "reason": reason})
        self._instances.remove(instance)
        error = InferenceError(Code.UNAVAILABLE, f"model '{self.name}' failed: {reason}")
        self._scheduler.remove(instance, error)
        self._trouble = f"{reason}; it is being restarted"

    async def _release(self, instance: Instance) -> None:
        try:
            await instance.close()
        except Exception:
            # The end of one model's life: what it leaves must not take the server along.
            log.exception("instance did not close", extra={"model": self.name})

    async def _replace(self, tries: int, reason: str) -> Instance | None:
        limit = self._limits.restart_tries
        if tries >= limit:
            self._give_up(f"{reason}; given up after {limit} restarts")
            await asyncio.Event().wait()
        self._trouble = f"{reason}; restart {tries + 1} of {limit} is under way, retry shortly"
        await asyncio.sleep(backoff_secs(tries))
        try:
            instance = await self._load()
        except InferenceError as error:
            log.error("restart failed", extra={"model": self.name, "reason": error.reason})
            return None
        except Exception:
            # Around one model load: a runtime's own exception must not take the server along.
            log.exception("restart failed unexpectedly", extra={"model": self.name})
            return None
        log.info("instance restarted", extra={"model": self.name, "restart": tries + 1})
        return instance

    def _give_up(self, trouble: str) -> None:
        """Leave one instance dead; without any other, nothing that waits can be served."""
        log.error("model given up", extra={"model": self.name, "reason": trouble})
        self._trouble = trouble
        if not self._instances:
            error = InferenceError(Code.UNAVAILABLE, f"model '{self.name}' failed: {trouble}")
            self.abandon(error)
