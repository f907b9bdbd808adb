"""Which ports does a server listen on, and what answers there?"""

import asyncio
import logging
import socket

from starlette.types import ASGIApp

from gateway.core import Core, Listeners, StartFailed
from gateway.frontends.grpc.server import GrpcServer, local_transport
from gateway.frontends.http.app import build_app, build_metrics_app
from gateway.frontends.http.listener import HttpListener, listening_at
from gateway.frontends.http.playground.routes import PlaygroundRoutes
from gateway.processes.listeners import ProcessHttpListener, ProcessListeners
from gateway.settings import HttpSettings, MetricsSettings, Settings

log = logging.getLogger("sluice.server")


class BoundListeners(Listeners):
    """HTTP, gRPC and the metrics page, as far as the settings ask for them.

    Raises StartFailed if an address cannot be had.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._doors = _doors(core)
        self._http: list[HttpListener | ProcessHttpListener] = []
        self._grpc: GrpcServer | None = None
        self._health: asyncio.Task[None] | None = None
        self.ports: dict[str, int] = {}
        try:
            self._bind(core.settings)
        except OSError as error:
            raise StartFailed(str(error)) from None

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to answer on every port."""
        tasks.create_task(self._doors.run())
        for listener in self._http:
            tasks.create_task(listener.serve())
        for name, port in self.ports.items():
            log.info("listening", extra={"for": name, "port": port})
        if self._grpc is not None:
            await self._grpc.start()
            self._health = tasks.create_task(self._grpc.follow_health())

    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Take no more connections."""
        for listener in self._http:
            listener.stop(grace_secs)
        if self._grpc is not None:
            tasks.create_task(self._grpc.stop())

    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Drop the clients that are left when the grace period is over."""
        for listener in self._http:
            asyncio.get_running_loop().call_later(grace_secs, listener.drop_half_requests)
        if self._grpc is not None:
            tasks.create_task(self._grpc.cut_off(grace_secs))
        if self._health is not None:
            self._health.cancel()

    def _bind(self, settings: Settings) -> None:
        dataplane, recordings = self._core.dataplane, self._core.recordings
        http = settings.http
        if http.enabled:
            playground = PlaygroundRoutes(dataplane, settings) if http.playground else None
            app = build_app(dataplane, http, settings.id, playground, recordings)
            self._http.append(self._doors.http(app, http))
            self.ports["http"] = self._http[-1].port
        if settings.metrics.enabled:
            page = build_metrics_app(
                dataplane,
                settings.metrics,
                self._core.read_cache,
                recordings.reading,
                self._doors.reading,
            )
            listening = _metrics_socket(settings.metrics)
            self._http.append(HttpListener(page, listening, limits=http.limits))
            self.ports["metrics"] = self._http[-1].port
        if settings.grpc.enabled:
            self._grpc = GrpcServer(
                dataplane, settings.grpc, settings.id, recordings, self._doors.grpc
            )
            self.ports["grpc"] = self._grpc.port


class OwnDoors:
    """Has this process listen."""

    grpc = staticmethod(local_transport)

    def http(self, app: ASGIApp, settings: HttpSettings) -> HttpListener:
        """The application behind its port; OSError when that cannot be had."""
        listening = listening_at(settings.address, settings.port)
        return HttpListener(app, listening, settings.send_timeout_secs, settings.limits)

    async def run(self) -> None:
        """There are no processes to run."""

    def reading(self) -> None:
        """Nor has anybody to tell of them."""


def _doors(core: Core) -> OwnDoors | ProcessListeners:
    count = core.settings.frontends
    return ProcessListeners(count, core.dataplane.log) if count else OwnDoors()


def _metrics_socket(settings: MetricsSettings) -> socket.socket:
    return listening_at(settings.address, settings.port)
