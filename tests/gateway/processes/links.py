"""A frontend process and its server in one event loop, with the frames of a real channel."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.frontends.grpc.rpc import Method, RpcCall
from gateway.frontends.http.request_scope import RawHeaders
from gateway.processes.channel import Channel, Frame
from gateway.processes.grpc import GrpcCall, relaying, shapes
from gateway.processes.http import HttpCall, HttpRelay
from gateway.processes.messages import FrontendKind
from gateway.processes.relayed_call import RelayedCalls
from gateway.processes.windows import FRAME_BYTES, REPORTED_BYTES, WINDOW_BYTES
from tests.builders import soon

PIECE = bytes(REPORTED_BYTES - FRAME_BYTES)

FITTING = WINDOW_BYTES // REPORTED_BYTES
"""The number of pieces that fill the window."""

TEXT: RawHeaders = [(b"content-type", b"text/plain")]

PATH = "/test.Service/Method"

SEND_TIMEOUT_SECS = 60.0


class Link:
    """A frontend process and the server, which starts calls as `ProcessListeners`."""

    def __init__(self, app: ASGIApp, method: Method) -> None:
        self._app = app
        self._methods = {PATH: method}
        self._tasks: list[asyncio.Task[None]] = []
        self._strays: asyncio.Queue[Frame] = asyncio.Queue()

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        self.frontend = await self._end(ours, lambda frame: None)
        self.server = await self._end(theirs, self._hear)
        self.calls = RelayedCalls(self.frontend)
        self.app = HttpRelay(self.calls)
        self.method = relaying(shapes(self._methods), self.calls, SEND_TIMEOUT_SECS)[PATH]

    async def close(self) -> None:
        """Close the channel; the tasks of the server end by themselves."""
        self.frontend.close()
        for channel in (self.frontend, self.server):
            await soon(channel.lost())
        await self.answered()
        for task in self._tasks:
            assert task.cancelled() or task.exception() is None

    async def answered(self) -> None:
        """Wait until no call is being answered."""
        if self._tasks:
            await soon(asyncio.wait(self._tasks))

    async def heard(self) -> None:
        """Wait until the server has received all frames."""
        self.frontend.send(FrontendKind.DROP_HALF)
        while (await soon(self._strays.get())).kind != FrontendKind.DROP_HALF:
            pass

    @property
    def is_idle(self) -> bool:
        """Whether no call is being answered."""
        return all(task.done() for task in self._tasks)

    async def lose_server(self) -> None:
        """As if the server's process had ended."""
        self.server.close()
        await soon(self.frontend.lost())

    async def _end(self, end: socket.socket, hear: Callable[[Frame], None]) -> Channel:
        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: Channel(hear), sock=end
        )
        return channel

    def _hear(self, frame: Frame) -> None:
        if frame.kind == FrontendKind.HTTP_CALL:
            http_call = HttpCall(self.server, frame.call, frame.payload)
            self._tasks.append(asyncio.create_task(http_call.run(self._app)))
        elif frame.kind == FrontendKind.GRPC_CALL:
            grpc_call = GrpcCall(self.server, frame.call, frame.payload)
            method = self._methods[grpc_call.path]
            self._tasks.append(asyncio.create_task(grpc_call.run(method)))
        else:
            self._strays.put_nowait(frame)


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the test asks no application")


async def no_method(asked: Any, call: RpcCall) -> None:
    raise AssertionError("the test asks no method")


NO_METHOD = Method(serve=no_method, parse=bytes, serialize=bytes)


@asynccontextmanager
async def linked(app: ASGIApp = no_app, method: Method = NO_METHOD) -> AsyncIterator[Link]:
    """Inside `async with` there is a server behind a frontend process."""
    link = Link(app, method)
    await link.open()
    try:
        yield link
    finally:
        await link.close()
