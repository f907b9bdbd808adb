"""The ports of a server: HTTP, gRPC, metrics and admin, here or in frontend processes."""

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp

from gateway.frontends.grpc.rpc import Method, Transport
from gateway.frontends.grpc.server import GrpcServer, TransportFactory, local_transport
from gateway.frontends.http.app import build_app, build_metrics_app
from gateway.frontends.http.listener import HttpListener, listening_at
from gateway.frontends.http.playground.routes import PlaygroundRoutes
from gateway.metrics_page import MetricsPage, access_reading, no_reading
from gateway.observability.metrics import FrontendsReading
from gateway.policy.api_keys import ApiKeys
from gateway.policy.areas import Area
from gateway.policy.credentials import MAY_READ, Credentials, CredentialSource
from gateway.policy.key_file import KeyFileError
from gateway.policy.tenants import Tenants
from gateway.server import Listeners, Server, StartFailed
from gateway.settings import GrpcSettings, HttpSettings, Settings
from gateway.storage.store import KEPT
from gateway.tls.certificates import Certificates
from gateway.unix_socket import OWNER_ONLY, listening_socket, unix_path

log = logging.getLogger("sluice.server")


class PortOfHttp(Protocol):
    """A listener of HTTP at one port."""

    port: int

    async def serve(self) -> None:
        """Serve until every connection has ended, after `stop`."""

    def stop(self, grace_secs: float) -> None:
        """Stop accepting; drop the remaining connections after the grace period."""

    def drop_half_requests(self) -> None:
        """Drop the connections with an incomplete request."""


class Processes(Protocol):
    """The part of `ProcessListeners` that is used; few servers import it."""

    def http(self, app: ASGIApp, settings: HttpSettings) -> PortOfHttp:
        """Bind the port of HTTP, for an application."""

    def grpc(self, methods: Mapping[str, Method], settings: GrpcSettings) -> Transport:
        """Bind the address of gRPC, for methods."""

    async def run(self) -> None:
        """Keep the processes running; return when they have ended after the shutdown."""

    def reading(self) -> FrontendsReading:
        """The metrics of the processes."""


async def bound(server: Server) -> "BoundListeners":
    """The listeners of a server, which do not answer yet.

    Raises StartFailed if an address is in use, or the key file, the key set or a certificate cannot
    be used.
    """
    return BoundListeners(server, await _credentials(server))


class BoundListeners(Listeners):
    """HTTP, gRPC, the metrics page and the admin ports, each if its setting is enabled.

    The admin ports are always in this process. Raises StartFailed if an address is in use, or a
    certificate cannot be used.
    """

    def __init__(self, server: Server, credentials: Credentials | None = None) -> None:
        self._server = server
        self._processes = _processes(server) if server.settings.frontends else None
        self._http: list[PortOfHttp] = []
        self._grpc: list[GrpcServer] = []
        self._followers: list[asyncio.Task[None]] = []
        self.ports: dict[str, int] = {}
        self._credentials = credentials
        self._certificates: list[Certificates] = []
        try:
            self._bind(server.settings)
        except OSError as error:
            raise StartFailed(str(error)) from None

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to answer on every port."""
        if self._processes is not None:
            tasks.create_task(self._processes.run())
        for listener in self._http:
            tasks.create_task(listener.serve())
        for name, port in self.ports.items():
            log.info("listening", extra={"for": name, "port": port})
        _log_open_areas(self._server.settings)
        _log_exposure(self._server.settings)
        for each in self._grpc:
            await each.start()
            self._followers.append(tasks.create_task(each.follow_health()))
        if self._credentials is not None:
            following = self._credentials.follow(self._end_invalid)
            self._followers.append(tasks.create_task(following))
        self._followers += [tasks.create_task(each.follow()) for each in self._certificates]

    def _end_invalid(self) -> None:
        """End the requests and the readers of streams whose caller is no longer valid."""
        self._server.dataplane.running.abandon_invalid()
        self._server.recordings.end_invalid()

    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Accept no more connections."""
        for listener in self._http:
            listener.stop(grace_secs)
        for each in self._grpc:
            tasks.create_task(each.stop())

    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        """Close the remaining connections after the grace period."""
        for listener in self._http:
            asyncio.get_running_loop().call_later(grace_secs, listener.drop_half_requests)
        for each in self._grpc:
            tasks.create_task(each.cut_off(grace_secs))
        for follower in self._followers:
            follower.cancel()

    def _bind(self, settings: Settings) -> None:
        http, processes = settings.http, self._processes
        certificates = Certificates(http.tls) if http.tls is not None else None
        if certificates is not None:
            self._certificates.append(certificates)
        if http.enabled and processes:
            self._add_http("http", processes.http(self._app(settings), http))
        elif http.enabled:
            listening = listening_at(http.address, http.port)
            self._add_http("http", self._listener(settings, listening, certificates))
        if settings.metrics.enabled:
            self._add_http("metrics", self._metrics(settings, certificates))
        if settings.admin is not None:
            listening = _admin_socket(settings.admin)
            at_admin = replace(settings, http=settings.admin)
            self._add_http("admin", self._listener(at_admin, listening, certificates))
        if settings.grpc.enabled:
            transport = processes.grpc if processes else local_transport
            self._add_grpc("grpc", settings.grpc, transport)
        if settings.grpc_admin is not None:
            self._add_grpc("grpc-admin", settings.grpc_admin, local_transport)

    def _app(self, settings: Settings) -> ASGIApp:
        """An application for one port of HTTP."""
        http, server = settings.http, self._server
        playground = PlaygroundRoutes(server.dataplane, settings) if http.playground else None
        return build_app(
            *(server.dataplane, http, settings.id),
            *(playground, server.recordings, self._credentials),
        )

    def _listener(
        self, settings: Settings, listening: socket.socket, certificates: Certificates | None
    ) -> HttpListener:
        http = settings.http
        return HttpListener(
            self._app(settings),
            listening,
            http.send_timeout_secs,
            http.limits,
            certificates=certificates,
            header_names=bool(http.header_forward_pattern),
            per_address=http.connections_per_address,
        )

    def _metrics(self, settings: Settings, certificates: Certificates | None) -> HttpListener:
        processes, dataplane = self._processes, self._server.dataplane
        page = MetricsPage(
            dataplane,
            settings.metrics,
            self._server.read_cache,
            self._server.recordings.reading,
            processes.reading if processes else no_reading,
            partial(
                access_reading,
                *(dataplane, self._credentials, self._certificates),
            ),
        )
        app = build_metrics_app(page, None if settings.metrics.open else self._credentials)
        listening = listening_at(settings.metrics.address, settings.metrics.port)
        http = settings.http
        return HttpListener(
            app,
            listening,
            limits=http.limits,
            certificates=certificates,
            per_address=http.connections_per_address,
        )

    def _add_http(self, name: str, listener: PortOfHttp) -> None:
        self._http.append(listener)
        self.ports[name] = listener.port

    def _add_grpc(self, name: str, settings: GrpcSettings, transport: TransportFactory) -> None:
        server = self._server
        found = GrpcServer(
            *(server.dataplane, settings, server.settings.id, server.recordings, transport),
            self._credentials,
        )
        self._grpc.append(found)
        self.ports[name] = found.port
        if found.certificates is not None:
            self._certificates.append(found.certificates)


async def _credentials(server: Server) -> Credentials | None:
    """The credentials of the server, if requests need one; StartFailed if they cannot be used."""
    settings = server.settings
    if settings.api_keys is None and settings.jwt is None:
        return None
    return Credentials(_api_keys(settings, server.tenants), await _tokens(settings))


def _api_keys(settings: Settings, tenants: Tenants | None) -> ApiKeys | None:
    if settings.api_keys is None:
        return None
    with _explained(f"--api-keys {settings.api_keys}"):
        return ApiKeys(settings.api_keys, tenants)


async def _tokens(settings: Settings) -> CredentialSource | None:
    if settings.jwt is None:
        return None
    try:
        # Their packages are optional, and take 9 MiB.
        from gateway.policy.json_web_tokens import JsonWebTokens
        from gateway.policy.key_set_source import key_set_source
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise StartFailed(
            f"--jwt-jwks needs the package '{package}', which is not installed: "
            "pip install 'sluice[jwt]'"
        ) from None
    place = settings.jwt.key_set
    with _explained(f"--jwt-jwks {place}"):
        source = await key_set_source(place, settings.models.store / KEPT / "key_sets")
    return JsonWebTokens(settings.jwt.rules, source)


@contextmanager
def _explained(option: str) -> Iterator[None]:
    """Raise StartFailed for keys that cannot be used, with the option that names them."""
    try:
        yield
    except KeyFileError as error:
        raise StartFailed(f"{option}: {error}") from None


def _log_open_areas(settings: Settings) -> None:
    """Log the areas that other machines may change, if there are some."""
    if settings.api_keys is not None or settings.jwt is not None:
        return
    found = {
        area
        for wire in (settings.http, settings.grpc, settings.admin, settings.grpc_admin)
        if wire is not None and wire.enabled and wire.changes
        for area in wire.control.open_areas(wire.address, wire.restrictions)
    }
    if found:
        areas = ",".join(each for each in Area if each in found)
        log.warning("control open", extra={"areas": areas})


def _log_exposure(settings: Settings) -> None:
    """Log what clients of a public server find there."""
    if not settings.public:
        return
    has_metrics = settings.metrics.enabled and not settings.metrics.open
    elsewhere = {Area.ADMIN} if has_metrics else {Area.ADMIN, Area.METRICS}
    with_key = (each for each in MAY_READ if each not in elsewhere)
    admin = (name for name in ("admin", "grpc-admin") if name in settings.listeners)
    log.info(
        "server exposed",
        extra={
            "without_key": Area.HEALTH,
            "with_key": ",".join(with_key),
            "changes_at": ",".join(admin) or "none",
        },
    )


def _processes(server: Server) -> Processes:
    from gateway.processes.listeners import ProcessListeners  # 0.2 MiB

    return ProcessListeners(server.settings.frontends, server.dataplane.log)


def _admin_socket(settings: HttpSettings) -> socket.socket:
    """A listening socket, also a Unix socket; OSError if the address is in use."""
    path = unix_path(settings.address)
    if path:
        return listening_socket(path, OWNER_ONLY)
    return listening_at(settings.address, settings.port)
