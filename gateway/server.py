"""The server: its parts, and their start, drain and stop, in a process or inside a program."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from gateway.admission.admission import Admission
from gateway.backend_loader import BackendLoader
from gateway.cache.cache import LocalCache, ResponseCache
from gateway.cache_settings import CacheSettings, LocalCacheSettings
from gateway.cuda_driver import load_driver, usable_gpus
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.event_loop import LoopWatch, busy_poll
from gateway.models.backend_control import BackendControl
from gateway.models.gen_ai_metrics import GenAiMetrics
from gateway.models.instance_groups import UsableGpus
from gateway.models.model import Model
from gateway.models.model_folder import NO_VERSIONS
from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.observability.access_log import access_log_of
from gateway.observability.log import Log
from gateway.observability.metrics import FleetMember
from gateway.observability.receipts import Receipts
from gateway.observability.statistics import CacheReading
from gateway.observability.tracer import build_tracer
from gateway.policy.audit import AuditLog
from gateway.policy.tenants import Tenants
from gateway.resumption.recordings import Recordings
from gateway.rollouts.rollouts import RolloutController
from gateway.settings import (
    ENVIRONMENT,
    FleetSettings,
    ModelSettings,
    Settings,
    netloc,
)
from gateway.shared_memory.regions import SharedMemory
from gateway.storage.mirror.errors import MirrorError
from gateway.storage.mirror.mirror import Mirror
from gateway.storage.mirror.opening import open_places
from gateway.storage.store import KEPT
from gateway.threads import closed, last_of_process, request_threads

log = logging.getLogger("sluice.server")

LAST_ANSWERS_SECS = 2.0
"""Time for clients to read the error that ends their requests after the drain."""

SWITCH_SECS = 0.001
"""Longest time for which a thread that decodes keeps the interpreter lock from the event loop.

Python's default is 5 ms: while 60 MiB of JSON are decoded, the 99th percentile of a health probe
is then 18 to 24 ms, and 7 to 14 ms with this. Decoding takes no longer.
"""


class StartFailed(Exception):
    """The server cannot start: an address is in use, or a model failed under --exit-on-error."""


class Listeners:
    """The ports of a server: none here; `gateway.listeners.BoundListeners` has HTTP and gRPC.

    Tasks go into the group of `open`, and end by themselves after `stop_waiting`.
    """

    ports: Mapping[str, int] = {}
    """The ports in use, by protocol; 0 for a Unix socket."""

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to answer: the process is live, though no model may be loaded yet."""

    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Accept no more connections; open requests may complete within the grace period."""

    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Close the connections that are left after the grace period: no request is open."""


class Server:
    """The parts of a server and the root task group; built and run on one event loop."""

    def __init__(self, settings: Settings, log_of_process: Log | None = None) -> None:
        self.settings = settings
        self._listeners = _listeners(settings)
        self._tracer = build_tracer(settings.trace)
        backends = _build_backends(settings)
        repository = _build_repository(settings.models, backends)
        self._cache = _build_cache(settings.cache)
        self._threads = request_threads()
        self._control = RepositoryControl(
            repository,
            settings.models,
            backends,
            self._cache,
            busy_poll(settings.stay_awake_us),
            self._threads,
        )
        self.tenants = None if settings.api_keys is None else Tenants()
        self._control.tenants = self.tenants
        self.dataplane = DataPlane(
            self._control,
            strict_readiness=settings.models.strict_readiness,
            shared_memory=SharedMemory(allowed=settings.allow_client_shm),
            tracer=self._tracer,
            log=log_of_process,
            threads=self._threads,
            audit=None if settings.audit_log is None else AuditLog(settings.audit_log),
            access_log=access_log_of(settings),
            state_directory=settings.state_directory,
            admission=settings.admission,
            receipts=Receipts(every=settings.server_timing),
        )
        if self.tenants is not None:
            self.dataplane.admission = Admission(self.tenants, settings=settings.admission)
        self.dataplane.gen_ai = GenAiMetrics() if settings.metrics.gen_ai else None
        self._router = self.dataplane.fleet = _build_router(settings, self._control)
        if self._router is not None:
            self.dataplane.rollouts.controller = self._router.rollouts
        self.recordings = Recordings(settings.resumption)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begin to drain; synchronous, idempotent."""
        self._stopping.set()

    def read_cache(self) -> CacheReading | None:
        """Counters of the response cache, if there is one."""
        return None if self._cache is None else self._cache.reading()

    async def run(self, on_ready: Callable[[Mapping[str, int]], None]) -> None:
        """Serve until `stop`; returns when all parts are closed.

        `on_ready` is called with the ports in use once the start-up models are loaded. Raises
        StartFailed, and InferenceError if the response cache is unreachable.
        """
        try:
            self._open_logs()
            if self._cache is not None:
                await self._cache.connect()
            failure = await self._serve(await self._listeners(self), on_ready)
        finally:
            await closed(self._tracer.close)
            self._threads.close()
            for each in (self.dataplane.audit, self.dataplane.access_log):
                if each is not None:
                    await closed(each.close)
        if failure:
            raise StartFailed(failure)

    def _open_logs(self) -> None:
        settings, dataplane = self.settings, self.dataplane
        for option, path, found in (
            ("--audit-log", settings.audit_log, dataplane.audit),
            ("--access-log", settings.access_log, dataplane.access_log),
        ):
            try:
                if found is not None:
                    found.open()
            except OSError as error:
                raise StartFailed(f"{option} {path}: {error.strerror}") from None

    async def _serve(
        self, listeners: Listeners, on_ready: Callable[[Mapping[str, int]], None]
    ) -> str:
        async with asyncio.TaskGroup() as tasks:
            caching = tasks.create_task(_work(self._cache))
            audit = self.dataplane.audit
            for_models = BackendControl(self._control, audit)
            rollouts = self.dataplane.rollouts
            rolling = tasks.create_task(rollouts.run())
            running = tasks.create_task(
                self._control.run(self.dataplane.call, for_models, audit, rollouts)
            )
            routing = tasks.create_task(_route(self._router))
            await listeners.open(tasks)
            failure = await self._loaded()
            if not failure:
                on_ready(listeners.ports)
                await self._stopping.wait()
            await self._drain(tasks, listeners)
            rolling.cancel()
            running.cancel()
            routing.cancel()
            caching.cancel()
        return failure

    async def _loaded(self) -> str:
        """Wait for the start-up models; returns the reason to end, or an empty text."""
        await _first_of(self._settled(), self._stopping.wait())
        failures = self._control.registry.failures()
        if self._stopping.is_set() or not failures or not self.settings.models.exit_on_error:
            return ""
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        failure = f"failed to load all models:\n{reasons}"
        is_on_ray = self.settings.models.left_out is not None
        return failure if is_on_ray else f"{failure}\n(--exit-on-error=false serves the others)"

    async def _settled(self) -> None:
        """Wait for the models of the repository, and for the first table of a router."""
        await self._control.registry.wait_settled()
        if self._router is not None:
            await self._router.attempted()

    async def _drain(self, tasks: asyncio.TaskGroup, listeners: Listeners) -> None:
        """Drain: not ready, wait for sequences, stop accepting, wait for requests, fail others."""
        limit, time = self.settings.exit_timeout_secs, asyncio.get_running_loop().time
        ends_at = time() + limit
        log.info("draining", extra={"requests": self.dataplane.in_flight, "limit_secs": limit})
        self.dataplane.refuse_requests()
        self._control.close_by(ends_at + LAST_ANSWERS_SECS)
        self.recordings.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                await self.dataplane.sequences_ended()
        listeners.stop_accepting(tasks, max(0, ends_at - time()) + LAST_ANSWERS_SECS)
        try:
            async with asyncio.timeout_at(ends_at):
                await self.dataplane.drained()
                await self.recordings.read_elsewhere()
        except TimeoutError:
            log.warning("drain over", extra={"abandoned": self.dataplane.in_flight})
            error = InferenceError(
                Code.UNAVAILABLE,
                "the server is shutting down and the request did not end within its "
                f"--exit-timeout-secs of {limit:g}",
            )
            self.dataplane.abandon(error)
            self.recordings.abandon_elsewhere(error)
        listeners.stop_waiting(tasks, LAST_ANSWERS_SECS)


async def serve(
    settings: Settings,
    log_of_process: Log,
    on_ready: Callable[[Mapping[str, int], Sequence[Model]], None],
) -> None:
    """Serve in a process of its own until SIGTERM or SIGINT; returns when all parts are closed.

    `on_ready` is called with the ports in use and the start-up models, once those are loaded.
    Raises as `Server.run`.
    """
    server = Server(settings, log_of_process)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)

    def ready(ports: Mapping[str, int]) -> None:
        _freeze()
        _log_started(settings, ports)
        on_ready(ports, list(server.dataplane.models()))

    sys.setswitchinterval(SWITCH_SECS)
    with last_of_process(), LoopWatch() as server.dataplane.loop_watch:
        await server.run(ready)


def _log_started(settings: Settings, ports: Mapping[str, int]) -> None:
    """Log the lines by which scripts know that Triton serves (protocol: flags, logging)."""
    for name, service, address in (
        ("grpc", "GRPCInferenceService", settings.grpc.address),
        ("http", "HTTPService", settings.http.address),
        ("metrics", "Metrics Service", settings.metrics.address),
    ):
        if name in ports:
            log.info("Started %s at %s", service, netloc(address, ports[name]))


def _freeze() -> None:
    """Exclude the objects of the start-up from garbage collection."""
    gc.collect()
    gc.freeze()


def _listeners(settings: Settings) -> Callable[[Server], Awaitable[Listeners]]:
    """The function that makes the listeners; those with ports take most of a second to import."""
    made = _no_listeners
    if settings.listeners:
        made = import_module("gateway.listeners").bound
    if settings.fleet is not None and settings.fleet.port is not None:
        return partial(_with_fleet_port, made, settings.fleet)
    return made


async def _no_listeners(server: Server) -> Listeners:
    return Listeners()


async def _with_fleet_port(
    made: Callable[[Server], Awaitable[Listeners]], fleet: FleetSettings, server: Server
) -> Listeners:
    inner = await made(server)
    if _is_router(fleet):
        port = import_module("gateway.fleet.relay_port").RelayPort(server, inner, fleet)
    else:
        port = import_module("gateway.fleet.replica").FleetPort(server, inner, fleet)
        server.dataplane.fleet = port
    await port.bind()
    found: Listeners = port
    return found


def _is_router(fleet: FleetSettings) -> bool:
    return bool(fleet.replicas or fleet.dns or fleet.ray is not None)


class _Router(FleetMember, Protocol):
    """The part of `gateway.fleet.router.Router` that is used; few servers import it."""

    rollouts: RolloutController

    async def run(self) -> None:
        """Keep the connections to the replicas."""

    async def attempted(self) -> None:
        """Wait until each replica is ready, or could not be reached."""


def _build_router(settings: Settings, control: RepositoryControl) -> _Router | None:
    fleet = settings.fleet
    if fleet is None or not _is_router(fleet):
        return None
    router: _Router = import_module("gateway.fleet.router").Router(
        fleet, control, summaries=settings.models.summaries
    )
    return router


async def _route(router: _Router | None) -> None:
    if router is not None:
        await router.run()


def _build_backends(settings: Settings) -> BackendLoader:
    models = settings.models
    every = {"frontends": str(settings.frontends), **models.backends.get("", {})}
    found = {**models.backends, "": every} if settings.frontends else models.backends
    return BackendLoader(found, models.store / KEPT, models.backend_directory)


def _build_repository(settings: ModelSettings, backends: BackendLoader) -> ModelRepository:
    minimum = settings.gpus.min_compute_capability
    usable = usable_gpus(load_driver(), minimum)
    found = ModelRepository(
        _open_places(settings),
        settings.config_name,
        UsableGpus(usable, minimum, backends.computes_on_gpus),
        auto_complete=settings.auto_complete,
        namespacing=settings.namespacing,
        model_name=settings.model_name,
    )
    found.left_out = settings.left_out or NO_VERSIONS
    return found


def _open_places(settings: ModelSettings) -> list[Path | Mirror]:
    """The repositories, after the first listing of remote ones; UNAVAILABLE if that fails."""
    try:
        return open_places(settings.repositories, ENVIRONMENT)
    except MirrorError as error:
        raise InferenceError(Code.UNAVAILABLE, str(error)) from None


def _build_cache(settings: CacheSettings | None) -> ResponseCache | None:
    """The configured response cache; UNSUPPORTED if its library is not installed."""
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
    """Wait until one of them is done; cancel the others and wait for them."""

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(wait) for wait in waits]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
