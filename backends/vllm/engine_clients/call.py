"""One request to a client of a shared engine: both ends of the call."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from backends.vllm.engine_clients.messages import (
    ClientKind,
    read_error,
    read_request,
    read_response,
    write_error,
    write_request,
    write_response,
)
from gateway.backend import Instance
from gateway.errors import UNEXPECTED, Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.processes.channel import Channel, ChannelCall, Frame

log = logging.getLogger("sluice.vllm")


def tokens(frame: Frame) -> int:
    """The number of completion tokens in a frame."""
    usage = read_response(frame.payload).usage if frame.kind == ClientKind.DATA else None
    return 0 if usage is None else usage.completion_tokens


class EngineCall(ChannelCall):
    """The server's end: sends the request when it is created.

    One task reads `responses`; then `leave` ends the call.
    """

    def __init__(self, channel: Channel, call: int, request: InferRequest) -> None:
        super().__init__(channel, call)
        self._model = request.model
        self._frames: deque[Frame] = deque()
        self._is_lost = False
        self._is_over = False
        payload = write_request(request)
        channel.join(call, self)
        channel.send(ClientKind.REQUEST, call, payload)

    async def responses(self) -> AsyncGenerator[InferResponse, None]:
        """The responses; InferenceError if the request is refused, or the client exits."""
        while not self._is_over:
            frame = await self._next()
            if frame.kind == ClientKind.DATA:
                self._passed_on(len(frame.payload))
                yield read_response(frame.payload)
                continue
            self._is_over = True
            if frame.kind == ClientKind.REFUSED:
                raise read_error(frame.payload)
            if frame.kind == ClientKind.ABORT:
                raise InferenceError(UNEXPECTED.code, UNEXPECTED.message)

    def leave(self) -> int:
        """End the call; returns the number of received unread tokens."""
        self._channel.leave(self._call)
        if self._is_over or self._is_lost:
            return 0
        self._channel.send(ClientKind.GONE, self._call)
        return sum(map(tokens, self._frames))

    def lose(self) -> None:
        self._is_lost = True
        self._wake()

    def _take(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._wake()

    async def _next(self) -> Frame:
        while not self._frames:
            if self._is_lost:
                raise InferenceError(
                    Code.UNAVAILABLE,
                    f"model '{self._model}': its engine has stopped; retry shortly",
                )
            await self._news()
        return self._frames.popleft()


class ServedCall(ChannelCall):
    """The client's end: `task` answers the request, and GONE or ABORT cancels it."""

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        super().__init__(channel, call)
        self.task: asyncio.Task[None] | None = None
        self._payload = payload
        self._is_gone = False
        channel.join(call, self)

    async def run(self, instance: Instance) -> None:
        """Answer by an instance; in every case the server gets the end of the call."""
        error: InferenceError | None = UNEXPECTED
        try:
            await self._answer(instance)
            error = None
        except InferenceError as found:
            error = found
        except Exception:
            # Around one request: the client gets no details.
            log.exception("request failed unexpectedly")
        finally:
            if not self._is_gone:
                self._end(error)

    def lose(self) -> None:
        self._is_gone = True
        if self.task is not None:
            self.task.cancel()

    async def _answer(self, instance: Instance) -> None:
        request = read_request(self._payload)
        async with aclosing(instance.execute((request,))) as answers:
            async for _, answer in answers:
                if isinstance(answer, InferenceError):
                    raise answer
                if isinstance(answer, InferResponse):
                    self._send_data(write_response(answer))
                    if not self._window.has_room:
                        await self._window.room()

    def _end(self, error: InferenceError | None) -> None:
        if error is None:
            self._channel.send(ClientKind.END, self._call)
        else:
            self._channel.send(ClientKind.REFUSED, self._call, write_error(error))

    def _take(self, frame: Frame) -> None:
        if frame.kind in (ClientKind.GONE, ClientKind.ABORT):
            self.lose()
