"""The composition root: builds the parts, starts them, and ends them in order."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any

from gateway.cache.local import LocalCache
from gateway.cache.response_cache import ResponseCache
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.server import GrpcServer
from gateway.frontends.http.app import build_app
from gateway.frontends.http.listener import HttpListener
from gateway.frontends.http.metrics import build_metrics_app
from gateway.models.model import Model
from gateway.models.registry import ModelRegistry
from gateway.models.repository import ModelRepository
from gateway.observability.log import Log
from gateway.observability.metrics import CacheReading
from gateway.observability.tracing import Tracer
from gateway.settings import CacheSettings, LocalCacheSettings, Settings
from gateway.shared_memory.regions import SharedMemory

log = logging.getLogger("sluice.server")

LAST_ANSWERS_SECS = 2.0
"""How long clients have to take the error that ends their requests when the drain is over."""


class StartFailed(Exception):
    """The server cannot start: a port cannot be had, or a model failed under --exit-on-error."""


class Server:
    """Owns the root task group: start, ready, drain, stop."""

    def __init__(self, settings: Settings, log_of_process: Log | None = None) -> None:
        self._settings = settings
        self._tracer = Tracer(settings.trace)
        repository = ModelRepository(
            settings.models.repositories,
            settings.models.config_name,
            auto_complete=settings.models.auto_complete,
            namespacing=settings.models.namespacing,
        )
        self._cache = _build_cache(settings.cache)
        self._registry = ModelRegistry(repository, settings.models, self._cache)
        self._dataplane = DataPlane(
            self._registry,
            strict_readiness=settings.models.strict_readiness,
            shared_memory=SharedMemory(allowed=settings.allow_client_shm),
            tracer=self._tracer,
            log=log_of_process,
        )
        self._stopping = asyncio.Event()
        self._http: list[HttpListener] = []
        self._grpc: GrpcServer | None = None

    def stop(self) -> None:
        """Begin to end; plain, idempotent."""
        self._stopping.set()

    async def run(self, on_ready: Callable[[Mapping[str, int], Sequence[Model]], None]) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; returns when everything has ended.

        `on_ready` is called once the start-up models are loaded, with the ports in use and them.
        Raises StartFailed.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        if self._cache is not None:
            await self._cache.connect()
        ports = self._bind()
        async with asyncio.TaskGroup() as tasks:
            caching = tasks.create_task(_work(self._cache))
            registry = tasks.create_task(self._registry.run(self._dataplane.infer))
            health = await self._listen(tasks, ports)
            failure = await self._loaded()
            if not failure:
                self._tell_started(ports)
                on_ready(ports, list(self._dataplane.models()))
                await self._stopping.wait()
            await self._drain(tasks)
            registry.cancel()
            health.cancel()
            caching.cancel()
        self._tracer.close()
        if failure:
            raise StartFailed(failure)

    def _bind(self) -> dict[str, int]:
        settings, ports = self._settings, {}
        try:
            if settings.http.enabled:
                app = build_app(self._dataplane, settings.http, settings.id)
                http = settings.http
                self._http.append(
                    HttpListener(app, http.address, http.port, http.send_timeout_secs)
                )
                ports["http"] = self._http[-1].port
            if settings.metrics.enabled:
                page = build_metrics_app(self._dataplane, settings.metrics, self._read_cache)
                metrics = settings.metrics
                self._http.append(HttpListener(page, metrics.address, metrics.port))
                ports["metrics"] = self._http[-1].port
            if settings.grpc.enabled:
                self._grpc = GrpcServer(self._dataplane, settings.grpc, settings.id)
                ports["grpc"] = self._grpc.port
        except OSError as error:
            raise StartFailed(str(error)) from None
        return ports

    def _read_cache(self) -> CacheReading | None:
        return None if self._cache is None else self._cache.reading()

    async def _listen(
        self, tasks: asyncio.TaskGroup, ports: Mapping[str, int]
    ) -> asyncio.Task[None]:
        for listener in self._http:
            tasks.create_task(listener.serve())
        for name, port in ports.items():
            log.info("listening", extra={"for": name, "port": port})
        if self._grpc is None:
            return tasks.create_task(asyncio.sleep(0))
        await self._grpc.start()
        return tasks.create_task(self._grpc.follow_health())

    def _tell_started(self, ports: Mapping[str, int]) -> None:
        """Log the lines by which scripts know that Triton serves (protocol: flags, logging)."""
        settings = self._settings
        for name, service, address in (
            ("grpc", "GRPCInferenceService", settings.grpc.address),
            ("http", "HTTPService", settings.http.address),
            ("metrics", "Metrics Service", settings.metrics.address),
        ):
            if name in ports:
                log.info("Started %s at %s:%d", service, address, ports[name])

    async def _loaded(self) -> str:
        """Wait for the start-up models; why the server must not go on, or nothing."""
        await _first_of(self._registry.wait_settled(), self._stopping.wait())
        failures = self._registry.failures()
        if self._stopping.is_set() or not failures or not self._settings.models.exit_on_error:
            return ""
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        return f"failed to load all models:\n{reasons}\n(--exit-on-error=false serves the others)"

    async def _drain(self, tasks: asyncio.TaskGroup) -> None:
        """Not ready, stop accepting, let requests end, then end the rest with an error."""
        limit = self._settings.exit_timeout_secs
        log.info("draining", extra={"requests": self._dataplane.in_flight, "limit_secs": limit})
        self._dataplane.refuse_requests()
        self._stop_accepting(tasks, limit + LAST_ANSWERS_SECS)
        try:
            async with asyncio.timeout(limit):
                await self._dataplane.drained()
        except TimeoutError:
            log.warning("drain over", extra={"abandoned": self._dataplane.in_flight})
            self._dataplane.abandon(
                InferenceError(
                    Code.UNAVAILABLE,
                    "the server is shutting down and the request did not end within its "
                    f"--exit-timeout-secs of {limit:g}",
                )
            )
        self._stop_waiting(tasks, LAST_ANSWERS_SECS)

    def _stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        for listener in self._http:
            listener.stop(grace_secs)
        if self._grpc is not None:
            tasks.create_task(self._grpc.stop())

    def _stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Every request has ended: drop who only watches, or has sent half of the next one."""
        for listener in self._http:
            asyncio.get_running_loop().call_later(grace_secs, listener.drop_half_requests)
        if self._grpc is not None:
            tasks.create_task(self._grpc.cut_off(grace_secs))


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
