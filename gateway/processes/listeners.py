"""Listeners of a server whose connections are in frontend processes."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from starlette.types import ASGIApp

from gateway.event_loop import LoopReading
from gateway.frontends.grpc.rpc import Method, Transport
from gateway.frontends.grpc.sockets import bound
from gateway.frontends.http.listener import listening_at
from gateway.observability.log import Log
from gateway.observability.metrics import FrontendsReading
from gateway.processes.channel import Channel, Frame
from gateway.processes.grpc import GrpcCall, shapes
from gateway.processes.http import HttpCall
from gateway.processes.messages import FrontendKind
from gateway.processes.supervisor import FrontendProcess, in_ms
from gateway.settings import GrpcSettings, GrpcTransport, HttpSettings, LogSettings
from gateway.tls.certificates import Certificates
from gateway.unix_socket import SocketFile, unix_path

Sockets = Sequence[socket.socket]
"""One socket per process; a Unix socket is shared by all."""


class ProcessListeners:
    """Listeners in `count` frontend processes; their calls are answered in this process.

    Call `http` and `grpc` before `run`; they raise OSError if an address cannot be bound, or the
    TLS files cannot be used.
    """

    def __init__(self, count: int, log: Log) -> None:
        self._count = count
        self._app: ASGIApp | None = None
        self._methods: Mapping[str, Method] = {}
        self._settings: dict[str, Any] = {"http": None, "grpc": None, "log": log.settings}
        self._sockets: dict[str, Sockets] = {}
        self._processes: Sequence[FrontendProcess] = ()
        self._tasks = asyncio.TaskGroup()
        self._ended = asyncio.Event()
        log.on_change(self._change_log)

    def http(self, app: ASGIApp, settings: HttpSettings) -> "ProcessHttpListener":
        """Bind the port of HTTP, for an application."""
        self._app = app
        self._settings["http"] = settings
        found = _http_sockets(settings, self._count)
        self._sockets["http_fd"] = found
        return ProcessHttpListener(self, found)

    def grpc(self, methods: Mapping[str, Method], settings: GrpcSettings) -> Transport:
        """Bind the address of gRPC, for methods."""
        self._methods = methods
        if settings.transport is not GrpcTransport.HYPER:
            raise OSError(
                f"--frontends needs --grpc-transport={GrpcTransport.HYPER}, "
                f"found {settings.transport}"
            )
        self._settings |= {"grpc": settings, "methods": shapes(methods)}
        certificates = Certificates(settings.tls) if settings.tls else None
        found = _grpc_sockets(settings, self._count)
        self._sockets["grpc_fd"] = found
        return ProcessGrpcTransport(self, found, settings, certificates)

    async def run(self) -> None:
        """Keep the processes running; return when they have ended after the shutdown."""
        count = self._count if self._sockets else 0
        self._processes = [self._process(index) for index in range(count)]
        async with self._tasks:
            async with asyncio.TaskGroup() as running:
                for each in self._processes:
                    running.create_task(each.run(self._begin_call))
            self._ended.set()

    def stop(self, kind: int, payload: bytes = b"") -> None:
        """Send a frame of the shutdown to every process."""
        for each in self._processes:
            each.stop(kind, payload)

    def reading(self) -> FrontendsReading:
        """The metrics of the processes."""
        return FrontendsReading(
            up=sum(each.up for each in self._processes),
            restarts=sum(each.restarts for each in self._processes),
            loops=reduce(
                LoopReading.with_other, (each.loop for each in self._processes), LoopReading()
            ),
        )

    async def ended(self) -> None:
        """Wait until every process has ended."""
        await self._ended.wait()

    def _change_log(self, settings: LogSettings) -> None:
        self._settings["log"] = settings
        for each in self._processes:
            each.change_log(settings)

    def _process(self, index: int) -> FrontendProcess:
        found = {name: sockets[index].fileno() for name, sockets in self._sockets.items()}
        return FrontendProcess(index, {**self._settings, **found}, tuple(found.values()))

    def _begin_call(self, channel: Channel, frame: Frame) -> None:
        """Start a call; frames of ended calls are ignored."""
        if frame.kind == FrontendKind.HTTP_CALL and self._app is not None:
            http_call = HttpCall(channel, frame.call, frame.payload)
            self._tasks.create_task(http_call.run(self._app))
        elif frame.kind == FrontendKind.GRPC_CALL:
            grpc_call = GrpcCall(channel, frame.call, frame.payload)
            self._tasks.create_task(grpc_call.run(self._methods[grpc_call.path]))


class ProcessHttpListener:
    """Listener of HTTP in frontend processes."""

    def __init__(self, listeners: ProcessListeners, sockets: Sockets) -> None:
        self._listeners = listeners
        self._sockets = sockets
        self.port: int = sockets[0].getsockname()[1]

    async def serve(self) -> None:
        """Wait until every connection has ended, after `stop`."""
        await self._listeners.ended()

    def stop(self, grace_secs: float) -> None:
        """Stop accepting; drop the remaining connections after the grace period."""
        _close(self._sockets)
        self._listeners.stop(FrontendKind.STOP_HTTP, in_ms(grace_secs))

    def drop_half_requests(self) -> None:
        """Drop the connections with an incomplete request."""
        self._listeners.stop(FrontendKind.DROP_HALF)


class ProcessGrpcTransport(Transport):
    """Transport of gRPC in frontend processes, which have the certificates, too."""

    def __init__(
        self,
        listeners: ProcessListeners,
        sockets: Sockets,
        settings: GrpcSettings,
        certificates: Certificates | None,
    ) -> None:
        self.certificates = certificates
        self._listeners = listeners
        self._sockets = sockets
        path = unix_path(settings.address)
        self._path = SocketFile(path) if path else None
        self.port = 0 if path else sockets[0].getsockname()[1]

    async def start(self) -> None:
        """The processes accept connections from their start."""

    async def stop(self) -> None:
        _close(self._sockets)
        if self._path is not None:
            self._path.remove()
        self._listeners.stop(FrontendKind.STOP_GRPC)
        await self._listeners.ended()

    async def cut_off(self, grace_secs: float) -> None:
        self._listeners.stop(FrontendKind.CUT_OFF, in_ms(grace_secs))
        await self._listeners.ended()


def _http_sockets(settings: HttpSettings, count: int) -> Sockets:
    """Sockets at one port, over which the system spreads connections.

    A port that another server uses is refused.
    """
    with listening_at(settings.address, settings.port) as first:
        port: int = first.getsockname()[1]
    return [listening_at(settings.address, port, reuse_port=True) for _ in range(count)]


def _grpc_sockets(settings: GrpcSettings, count: int) -> Sockets:
    first = bound(settings)
    if unix_path(settings.address):
        return [first] * count
    with first:
        port: int = first.getsockname()[1]
    of_each = replace(settings, port=port, reuse_port=True)
    return [bound(of_each) for _ in range(count)]


def _close(sockets: Sockets) -> None:
    """Close the sockets of this process; the frontend processes have their own."""
    for each in sockets:
        each.close()
