"""A frontend process: it has the clients' connections, and the server has everything else."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from gateway.frontend_processes.channel import Channel
from gateway.frontend_processes.frames import SERVER, Frame, Kind, read_headed, read_number
from gateway.frontend_processes.grpc_relay import relaying
from gateway.frontend_processes.http_relay import HttpRelay
from gateway.frontend_processes.relayed_call import Calls
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.transport import Transport
from gateway.frontends.http.listener import HttpListener
from gateway.settings import GrpcSettings, HttpSettings


class Frontend:
    """Listens at the sockets that the server has bound, until that says stop or is gone."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Future[Mapping[str, Any]] = self._loop.create_future()
        self._http: HttpListener | None = None
        self._grpc: Transport | None = None
        self._grpc_ended = asyncio.Event()
        self._tasks = asyncio.TaskGroup()

    async def run(self, connection: socket.socket) -> None:
        """Serve; returns when the last client is gone."""
        _, channel = await self._loop.create_unix_connection(
            lambda: Channel(self._hear), sock=connection
        )
        async with self._tasks:
            lost = self._tasks.create_task(self._leave_with_server(channel))
            try:
                await self._serve(await self._told, Calls(channel))
            finally:
                lost.cancel()
        channel.close()

    async def _serve(self, told: Mapping[str, Any], calls: Calls) -> None:
        if told["grpc"] is None:
            self._grpc_ended.set()
        else:
            settings = TypeAdapter(GrpcSettings).validate_python(told["grpc"])
            methods = relaying(told["methods"], calls)
            self._grpc = HyperTransport(methods, settings, socket.socket(fileno=told["grpc_fd"]))
            await self._grpc.start()
        if told["http"] is not None:
            settings_of_http = TypeAdapter(HttpSettings).validate_python(told["http"])
            bound = socket.socket(fileno=told["http_fd"])
            self._http = HttpListener(HttpRelay(calls), bound, settings_of_http.send_timeout_secs)
            await self._http.serve()
        await self._grpc_ended.wait()

    def _hear(self, frame: Frame) -> None:
        """What the server says; also of calls that have ended here, which nobody wants to know."""
        if frame.call != SERVER:
            return
        if frame.kind == Kind.SETTINGS:
            self._told.set_result(read_headed(frame.payload)[0])
        elif frame.kind == Kind.STOP_HTTP and self._http is not None:
            self._http.stop(read_number(frame.payload) / 1000)
        elif frame.kind == Kind.DROP_HALF and self._http is not None:
            self._http.drop_half_requests()
        elif frame.kind == Kind.STOP_GRPC:
            self._tasks.create_task(self._stop_grpc())
        elif frame.kind == Kind.CUT_OFF and self._grpc is not None:
            self._tasks.create_task(self._grpc.cut_off(read_number(frame.payload) / 1000))

    async def _stop_grpc(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop()
        self._grpc_ended.set()

    async def _leave_with_server(self, channel: Channel) -> None:
        """When the server is gone, everybody is dropped."""
        await channel.lost()
        if not self._told.done():
            self._told.cancel()
        if self._http is not None:
            self._http.stop(0)
        self._tasks.create_task(self._stop_grpc())
        if self._grpc is not None:
            await self._grpc.cut_off(0)
