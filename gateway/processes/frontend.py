"""A frontend process: it has the clients' connections, and the server has everything else."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.rpc import Transport
from gateway.frontends.http.listener import HttpListener
from gateway.observability.log import Log
from gateway.processes.channel import NO_CALL, Channel, Frame, number, read_headed, read_number
from gateway.processes.grpc import relaying
from gateway.processes.http import HttpRelay
from gateway.processes.messages import FrontendKind
from gateway.processes.relayed_call import RelayedCalls
from gateway.settings import GrpcSettings, HttpSettings, LogSettings


class Frontend:
    """Listens at the sockets that the server has bound, until that says stop or is gone.

    What the server says is done in its order, and once there is something to stop.
    """

    def __init__(self) -> None:
        self._said: asyncio.Queue[Frame] = asyncio.Queue()
        self._http: HttpListener | None = None
        self._grpc: Transport | None = None
        self._grpc_stop = asyncio.Event()
        self._ends: list[asyncio.Task[None]] = []
        self._log = Log()

    async def run(self, connection: socket.socket) -> None:
        """Serve; returns when the last client is gone."""
        loop = asyncio.get_running_loop()
        channel = Channel(lambda frame: self._hear(channel, frame))
        await loop.create_unix_connection(lambda: channel, sock=connection)
        async with asyncio.TaskGroup() as tasks:
            gone = tasks.create_task(self._leave_with_server(channel))
            first = await self._said.get()
            if first.kind == FrontendKind.SETTINGS:
                await self._start(read_headed(first.payload)[0], RelayedCalls(channel), tasks)
                obeying = tasks.create_task(self._obey(tasks))
                await asyncio.wait(self._ends)
                obeying.cancel()
            gone.cancel()
        channel.close()

    async def _start(
        self, told: Mapping[str, Any], calls: RelayedCalls, tasks: asyncio.TaskGroup
    ) -> None:
        self._log = Log(_log_settings(told["log"]))
        self._log.install()
        if told["grpc"] is not None:
            grpc_settings = TypeAdapter(GrpcSettings).validate_python(told["grpc"])
            methods = relaying(told["methods"], calls, grpc_settings.send_timeout_secs)
            bound = socket.socket(fileno=told["grpc_fd"])
            self._grpc = HyperTransport(methods, grpc_settings, bound)
            await self._grpc.start()
            self._ends.append(tasks.create_task(self._end_grpc(self._grpc)))
        if told["http"] is not None:
            settings = TypeAdapter(HttpSettings).validate_python(told["http"])
            bound = socket.socket(fileno=told["http_fd"])
            self._http = HttpListener(
                HttpRelay(calls), bound, settings.send_timeout_secs, settings.limits
            )
            self._ends.append(tasks.create_task(self._http.serve()))

    async def _end_grpc(self, grpc: Transport) -> None:
        """Wait until it is to stop, and then until the last RPC has ended."""
        await self._grpc_stop.wait()
        await grpc.stop()

    def _hear(self, channel: Channel, frame: Frame) -> None:
        """What the server says; also of calls that have ended here, which nobody wants to know."""
        if frame.kind == FrontendKind.PING:
            channel.send(FrontendKind.PONG)
        elif frame.call == NO_CALL:
            self._said.put_nowait(frame)

    async def _obey(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._do(await self._said.get(), tasks)

    def _do(self, frame: Frame, tasks: asyncio.TaskGroup) -> None:
        if frame.kind == FrontendKind.STOP_HTTP and self._http is not None:
            self._http.stop(read_number(frame.payload) / 1000)
        elif frame.kind == FrontendKind.DROP_HALF and self._http is not None:
            self._http.drop_half_requests()
        elif frame.kind == FrontendKind.LOG:
            self._log.change(asdict(_log_settings(read_headed(frame.payload)[0])))
        elif frame.kind == FrontendKind.STOP_GRPC and self._grpc is not None:
            self._grpc_stop.set()
        elif frame.kind == FrontendKind.CUT_OFF and self._grpc is not None:
            tasks.create_task(self._grpc.cut_off(read_number(frame.payload) / 1000))

    async def _leave_with_server(self, channel: Channel) -> None:
        """When the server is gone, everybody is dropped."""
        await channel.lost()
        now = number(0)
        for kind in (FrontendKind.STOP_HTTP, FrontendKind.STOP_GRPC, FrontendKind.CUT_OFF):
            self._said.put_nowait(Frame(kind, NO_CALL, now))


def _log_settings(told: Mapping[str, Any]) -> LogSettings:
    found: LogSettings = TypeAdapter(LogSettings).validate_python(told)
    return found
