"""Frontend process: the listeners, whose calls the server answers."""

import asyncio
import logging
import pickle
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gateway.errors import InferenceError
from gateway.event_loop import LoopWatch
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.rpc import Transport
from gateway.frontends.http.listener import HttpListener
from gateway.observability.log import Log
from gateway.processes.channel import NO_CALL, Channel, Frame, number, read_number
from gateway.processes.grpc import relaying
from gateway.processes.http import HttpRelay
from gateway.processes.messages import FrontendKind, written_loop
from gateway.processes.relayed_call import RelayedCalls
from gateway.settings import GrpcSettings, HttpSettings, LogSettings
from gateway.tls.certificates import Certificates

log = logging.getLogger("sluice.server")


class Frontend:
    """Serves the sockets that the server has bound, until the server stops it or disconnects.

    Commands of the server run in order, after the listeners have started.
    """

    def __init__(self) -> None:
        self._commands: asyncio.Queue[Frame] = asyncio.Queue()
        self._http: HttpListener | None = None
        self._grpc: Transport | None = None
        self._grpc_stop = asyncio.Event()
        self._ends: list[asyncio.Task[None]] = []
        self._followers: list[asyncio.Task[None]] = []
        self._log = Log()
        self._watch = LoopWatch()

    async def run(self, connection: socket.socket) -> None:
        """Serve until the last client has disconnected after a stop."""
        loop = asyncio.get_running_loop()
        channel = Channel(lambda frame: self._receive(channel, frame))
        await loop.create_unix_connection(lambda: channel, sock=connection)
        with self._watch:
            await self._serve(channel)
        channel.close()

    async def _serve(self, channel: Channel) -> None:
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(self._stop_with_server(channel))
            first = await self._commands.get()
            if first.kind == FrontendKind.SETTINGS:
                await self._start(pickle.loads(first.payload), RelayedCalls(channel), tasks)
                running = tasks.create_task(self._run_commands(tasks))
                await asyncio.wait(self._ends)
                running.cancel()
                for each in self._followers:
                    each.cancel()
            stopping.cancel()

    async def _start(
        self, settings: Mapping[str, Any], calls: RelayedCalls, tasks: asyncio.TaskGroup
    ) -> None:
        self._log = Log(settings["log"])
        self._log.install()
        grpc_settings: GrpcSettings | None = settings["grpc"]
        if grpc_settings is not None:
            methods = relaying(settings["methods"], calls, grpc_settings.send_timeout_secs)
            bound = socket.socket(fileno=settings["grpc_fd"])
            self._grpc = HyperTransport(methods, grpc_settings, bound)
            self._follow(self._grpc.certificates, tasks)
            await self._grpc.start()
            self._ends.append(tasks.create_task(self._end_grpc(self._grpc)))
        http_settings: HttpSettings | None = settings["http"]
        if http_settings is not None:
            bound = socket.socket(fileno=settings["http_fd"])
            tls = http_settings.tls
            certificates = None if tls is None else Certificates(tls)
            self._follow(certificates, tasks)
            self._http = HttpListener(
                HttpRelay(calls),
                bound,
                http_settings.send_timeout_secs,
                http_settings.limits,
                certificates=certificates,
                header_names=True,
                per_address=http_settings.connections_per_address,
            )
            self._ends.append(tasks.create_task(self._http.serve()))

    def _follow(self, certificates: Certificates | None, tasks: asyncio.TaskGroup) -> None:
        if certificates is not None:
            self._followers.append(tasks.create_task(certificates.follow()))

    async def _end_grpc(self, grpc: Transport) -> None:
        """Wait for the stop, and then for the end of the last RPC."""
        await self._grpc_stop.wait()
        await grpc.stop()

    def _receive(self, channel: Channel, frame: Frame) -> None:
        """Queue a command of the server; frames of ended calls are ignored."""
        if frame.kind == FrontendKind.PING:
            channel.send(FrontendKind.PONG, NO_CALL, written_loop(self._watch.reading))
        elif frame.call == NO_CALL:
            self._commands.put_nowait(frame)

    async def _run_commands(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._run_command(await self._commands.get(), tasks)

    def _run_command(self, frame: Frame, tasks: asyncio.TaskGroup) -> None:
        if frame.kind == FrontendKind.STOP_HTTP and self._http is not None:
            self._http.stop(read_number(frame.payload) / 1000)
        elif frame.kind == FrontendKind.DROP_HALF and self._http is not None:
            self._http.drop_half_requests()
        elif frame.kind == FrontendKind.LOG:
            self._change_log(pickle.loads(frame.payload))
        elif frame.kind == FrontendKind.STOP_GRPC and self._grpc is not None:
            self._grpc_stop.set()
        elif frame.kind == FrontendKind.CUT_OFF and self._grpc is not None:
            tasks.create_task(self._grpc.cut_off(read_number(frame.payload) / 1000))

    def _change_log(self, settings: LogSettings) -> None:
        try:
            self._log.change(asdict(settings))
        except InferenceError as error:
            log.error("log settings not changed", extra={"reason": error.reason})

    async def _stop_with_server(self, channel: Channel) -> None:
        """Stop all listeners immediately after a disconnect of the server."""
        await channel.lost()
        now = number(0)
        for kind in (FrontendKind.STOP_HTTP, FrontendKind.STOP_GRPC, FrontendKind.CUT_OFF):
            self._commands.put_nowait(Frame(kind, NO_CALL, now))
