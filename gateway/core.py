"""The composition root: builds the parts that every use of the gateway has, runs and ends them."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from gateway.backend_loader import BackendLoader
from gateway.cache.cache import ResponseCache
from gateway.cache.local import LocalCache
from gateway.cuda_driver import load_driver, usable_gpus
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.models.busy_poll import BusyPoll
from gateway.models.instance_groups import UsableGpus
from gateway.models.registry import ModelRegistry, RegistryControl
from gateway.models.repository import ModelRepository
from gateway.observability.log import Log
from gateway.observability.metrics import CacheReading
from gateway.observability.tracer import Tracer
from gateway.resumption.recordings import Recordings
from gateway.settings import CacheSettings, LocalCacheSettings, ModelSettings, Settings
from gateway.shared_memory.regions import SharedMemory
from gateway.storage.store import KEPT
from gateway.threads import request_threads

log = logging.getLogger("sluice.server")

LAST_ANSWERS_SECS = 2.0
"""How long clients have to take the error that ends their requests when the drain is over."""


class StartFailed(Exception):
    """The server cannot start: a port cannot be had, or a model failed under --exit-on-error."""


class Listeners(ABC):
    """What brings requests from other processes, once its ports have been bound.

    Its tasks go into the group it is given, and end by themselves after `stop_waiting`.
    """

    ports: Mapping[str, int]
    """The ports in use, by what answers there; 0 for a Unix socket."""

    @abstractmethod
    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to answer: the process is live, though no model may be loaded yet."""

    @abstractmethod
    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Take no more connections; what is under way may end within the grace period."""

    @abstractmethod
    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Every request has ended: drop who only watches, or has sent half of the next one."""


class NoListeners(Listeners):
    """Requests come from this process only."""

    def __init__(self, core: "Core") -> None:
        self.ports = {}

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Nobody is to be let in."""

    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Nobody was let in."""

    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Nobody has connected."""


class Core:
    """Owns the root task group: start, ready, drain, stop. Built and run on one event loop."""

    def __init__(self, settings: Settings, log_of_process: Log | None = None) -> None:
        self.settings = settings
        self._tracer = Tracer(settings.trace)
        backends = _build_backends(settings)
        repository = _build_repository(settings.models, backends)
        self._cache = _build_cache(settings.cache)
        awake = BusyPoll(settings.stay_awake_us)
        self._threads = request_threads()
        self._registry = ModelRegistry(
            repository, settings.models, backends, self._cache, awake, self._threads
        )
        self.dataplane = DataPlane(
            self._registry,
            strict_readiness=settings.models.strict_readiness,
            shared_memory=SharedMemory(allowed=settings.allow_client_shm),
            tracer=self._tracer,
            log=log_of_process,
            threads=self._threads,
        )
        self.recordings = Recordings(settings.resumption)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begin to end; plain, idempotent."""
        self._stopping.set()

    def read_cache(self) -> CacheReading | None:
        """What the response cache has done, if there is one."""
        return None if self._cache is None else self._cache.reading()

    async def run(
        self, bind: Callable[["Core"], Listeners], on_ready: Callable[[Mapping[str, int]], None]
    ) -> None:
        """Serve until `stop`; returns when everything has ended.

        `bind` makes the listeners. `on_ready` is called once the start-up models are loaded, with
        the ports in use. Raises StartFailed, InferenceError if the response cache cannot be had,
        and what `bind` raises.
        """
        try:
            if self._cache is not None:
                await self._cache.connect()
            failure = await self._serve(bind(self), on_ready)
        finally:
            self._tracer.close()
            self._threads.close()
        if failure:
            raise StartFailed(failure)

    async def _serve(
        self, listeners: Listeners, on_ready: Callable[[Mapping[str, int]], None]
    ) -> str:
        async with asyncio.TaskGroup() as tasks:
            caching = tasks.create_task(_work(self._cache))
            control = RegistryControl(self._registry)
            registry = tasks.create_task(self._registry.run(self.dataplane.call, control))
            await listeners.open(tasks)
            failure = await self._loaded()
            if not failure:
                on_ready(listeners.ports)
                await self._stopping.wait()
            await self._drain(tasks, listeners)
            registry.cancel()
            caching.cancel()
        return failure

    async def _loaded(self) -> str:
        """Wait for the start-up models; why the server must not go on, or nothing."""
        await _first_of(self._registry.wait_settled(), self._stopping.wait())
        failures = self._registry.failures()
        if self._stopping.is_set() or not failures or not self.settings.models.exit_on_error:
            return ""
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        return f"failed to load all models:\n{reasons}\n(--exit-on-error=false serves the others)"

    async def _drain(self, tasks: asyncio.TaskGroup, listeners: Listeners) -> None:
        """Not ready; let sequences end, stop accepting, let requests end; others get an error."""
        limit, time = self.settings.exit_timeout_secs, asyncio.get_running_loop().time
        ends_at = time() + limit
        log.info("draining", extra={"requests": self.dataplane.in_flight, "limit_secs": limit})
        self.dataplane.refuse_requests()
        self._registry.close_by(ends_at + LAST_ANSWERS_SECS)
        self.recordings.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                await self.dataplane.sequences_ended()
        listeners.stop_accepting(tasks, max(0, ends_at - time()) + LAST_ANSWERS_SECS)
        try:
            async with asyncio.timeout_at(ends_at):
                await self.dataplane.drained()
        except TimeoutError:
            log.warning("drain over", extra={"abandoned": self.dataplane.in_flight})
            self.dataplane.abandon(
                InferenceError(
                    Code.UNAVAILABLE,
                    "the server is shutting down and the request did not end within its "
                    f"--exit-timeout-secs of {limit:g}",
                )
            )
        listeners.stop_waiting(tasks, LAST_ANSWERS_SECS)


def _build_backends(settings: Settings) -> BackendLoader:
    models = settings.models
    told = {"frontends": str(settings.frontends), **models.backends.get("", {})}
    found = {**models.backends, "": told} if settings.frontends else models.backends
    return BackendLoader(found, models.store / KEPT, models.backend_directory)


def _build_repository(settings: ModelSettings, backends: BackendLoader) -> ModelRepository:
    minimum = settings.gpus.min_compute_capability
    usable = usable_gpus(load_driver(), minimum)
    return ModelRepository(
        settings.repositories,
        settings.config_name,
        UsableGpus(usable, minimum, backends.computes_on_gpus),
        auto_complete=settings.auto_complete,
        namespacing=settings.namespacing,
    )


def _build_cache(settings: CacheSettings | None) -> ResponseCache | None:
    """The response cache that is asked for; UNSUPPORTED if its library is not installed."""
    if settings is None:
        return None
    if isinstance(settings, LocalCacheSettings):
        return LocalCache(settings.byte_size)
    try:
        cache: ResponseCache = import_module("gateway.cache.redis").RedisCache(settings)
    except ModuleNotFoundError:
        raise InferenceError(
            Code.UNSUPPORTED, "--cache-config redis needs the package redis: pip install redis"
        ) from None
    return cache


async def _work(cache: ResponseCache | None) -> None:
    if cache is not None:
        await cache.run()


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done; the others are cancelled and waited for."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(wait) for wait in waits]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
