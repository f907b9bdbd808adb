"""Where connections are while frontend processes have them: the listeners that the server sees."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from starlette.types import ASGIApp

from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import Transport
from gateway.frontends.grpc.sockets import SocketFile, bound, read_certificates, unix_path
from gateway.frontends.http.listener import listening_at
from gateway.observability.log import Log
from gateway.observability.metrics import FrontendsReading
from gateway.processes.channel import Channel, Frame
from gateway.processes.grpc import GrpcCall, shapes
from gateway.processes.http import HttpCall
from gateway.processes.messages import FrontendKind
from gateway.processes.supervisor import FrontendProcess, in_ms
from gateway.settings import GrpcSettings, GrpcTransport, HttpSettings, LogSettings

Sockets = Sequence[socket.socket]
"""One for each process; all the same one if it is in the file system."""


class ProcessListeners:
    """Has so many processes listen; what comes there is answered by what stands behind the doors.

    `http` and `grpc` come before `run`. They raise OSError when an address cannot be had.
    """

    def __init__(self, count: int, log: Log) -> None:
        self._count = count
        self._app: ASGIApp | None = None
        self._methods: Mapping[str, Method] = {}
        self._told: dict[str, Any] = {"http": None, "grpc": None, "log": asdict(log.settings)}
        self._sockets: dict[str, Sockets] = {}
        self._processes: Sequence[FrontendProcess] = ()
        self._tasks = asyncio.TaskGroup()
        self._ended = asyncio.Event()
        log.on_change(self._log_differently)

    def http(self, app: ASGIApp, settings: HttpSettings) -> "ProcessHttpListener":
        """The application behind its port."""
        self._app = app
        self._told["http"] = asdict(settings)
        found = _http_sockets(settings, self._count)
        self._sockets["http_fd"] = found
        return ProcessHttpListener(self, found)

    def grpc(self, methods: Mapping[str, Method], settings: GrpcSettings) -> Transport:
        """The methods behind theirs."""
        self._methods = methods
        if settings.transport is not GrpcTransport.HYPER:
            raise OSError(
                f"--frontends needs --grpc-transport={GrpcTransport.HYPER}, "
                f"found {settings.transport}"
            )
        self._told |= {"grpc": asdict(settings), "methods": shapes(methods)}
        found = _grpc_sockets(settings, self._count)
        self._sockets["grpc_fd"] = found
        return ProcessGrpcTransport(self, found, settings)

    async def run(self) -> None:
        """Keep the processes running until they have been told to stop, and have ended."""
        count = self._count if self._sockets else 0
        self._processes = [self._process(index) for index in range(count)]
        async with self._tasks:
            async with asyncio.TaskGroup() as running:
                for each in self._processes:
                    running.create_task(each.run(self._hear))
            self._ended.set()

    def tell(self, kind: int, payload: bytes = b"") -> None:
        """Say something to every process."""
        for each in self._processes:
            each.tell(kind, payload)

    def reading(self) -> FrontendsReading:
        """The processes as metrics see them."""
        return FrontendsReading(
            up=sum(each.up for each in self._processes),
            restarts=sum(each.restarts for each in self._processes),
        )

    async def ended(self) -> None:
        """Wait until no process is left."""
        await self._ended.wait()

    def _log_differently(self, settings: LogSettings) -> None:
        self._told["log"] = asdict(settings)
        for each in self._processes:
            each.log_differently(self._told["log"])

    def _process(self, index: int) -> FrontendProcess:
        found = {name: sockets[index].fileno() for name, sockets in self._sockets.items()}
        return FrontendProcess(index, {**self._told, **found}, tuple(found.values()))

    def _hear(self, channel: Channel, frame: Frame) -> None:
        """A call begins; what else comes here is of one that has ended."""
        if frame.kind == FrontendKind.HTTP_CALL and self._app is not None:
            http_call = HttpCall(channel, frame.call, frame.payload)
            self._tasks.create_task(http_call.run(self._app))
        elif frame.kind == FrontendKind.GRPC_CALL:
            grpc_call = GrpcCall(channel, frame.call, frame.payload)
            self._tasks.create_task(grpc_call.run(self._methods[grpc_call.path]))


class ProcessHttpListener:
    """The port of HTTP."""

    def __init__(self, doors: ProcessListeners, sockets: Sockets) -> None:
        self._doors = doors
        self._sockets = sockets
        self.port: int = sockets[0].getsockname()[1]

    async def serve(self) -> None:
        """Wait until every connection has ended, after `stop`."""
        await self._doors.ended()

    def stop(self, grace_secs: float) -> None:
        """Accept nothing more; what is under way may end within the grace period."""
        _close(self._sockets)
        self._doors.tell(FrontendKind.STOP_HTTP, in_ms(grace_secs))

    def drop_half_requests(self) -> None:
        """Drop the connections on which a request has begun to arrive, and has not ended."""
        self._doors.tell(FrontendKind.DROP_HALF)


class ProcessGrpcTransport(Transport):
    """The address of gRPC; OSError if its TLS cannot be served."""

    def __init__(self, doors: ProcessListeners, sockets: Sockets, settings: GrpcSettings) -> None:
        if settings.tls is not None:
            read_certificates(settings.tls)
        self._doors = doors
        self._sockets = sockets
        path = unix_path(settings.address)
        self._path = SocketFile(path) if path else None
        self.port = 0 if path else sockets[0].getsockname()[1]

    async def start(self) -> None:
        """The processes accept as soon as they run."""

    async def stop(self) -> None:
        _close(self._sockets)
        if self._path is not None:
            self._path.remove()
        self._doors.tell(FrontendKind.STOP_GRPC)
        await self._doors.ended()

    async def cut_off(self, grace_secs: float) -> None:
        self._doors.tell(FrontendKind.CUT_OFF, in_ms(grace_secs))
        await self._doors.ended()


def _http_sockets(settings: HttpSettings, count: int) -> Sockets:
    """At one port; the system spreads connections over them. A port that is shared is refused."""
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
    """Let go of them: the processes have their own."""
    for each in sockets:
        each.close()
