"""Executions whose worker is the test."""

import asyncio
import socket
from contextlib import suppress
from dataclasses import replace

from backends.python.codec import RequestEncoder
from backends.python.connection import FrameSocket, WorkerConnection
from backends.python.executions import WorkerExecutions
from backends.python.worker.sluice_worker.protocol import IncomingSegments, OutgoingSegments
from gateway.backend import Answer, Note
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.stream import ResponseStream
from tests.backends.python.loading import CONFIG, DECOUPLED
from tests.builders import soon, text_request, text_response

ERROR = InferenceError(Code.INTERNAL, "no")
PART = text_response("part")
LAST = text_response("last", final=True)
ANSWER = [[["y", "FP32", [1], 4, 0]], None, None]
BODY = memoryview(bytes(4))


class Ends:
    """A link whose other end is sockets of the test's, and the owner of its executions."""

    def __init__(self) -> None:
        self.is_killed = asyncio.Event()
        self._sockets = [socket.socketpair() for _ in range(3)]
        mine = [pair[0] for pair in self._sockets]
        work, control = (FrameSocket(each, _ignore, _ignore) for each in mine[:2])
        self.link = WorkerConnection(
            work, control, IncomingSegments(mine[2]), OutgoingSegments(mine[2])
        )
        self.killed: list[str] = []
        self.disconnects = 0

    def kill(self, why: str) -> None:
        self.killed.append(why)
        self.is_killed.set()

    def disconnected(self) -> None:
        self.disconnects += 1

    def close(self) -> None:
        self.link.close()
        for pair in self._sockets:
            for each in pair:
                each.close()


def _ignore(*_: object) -> None:
    """Nothing comes here."""


class Played:
    """WorkerExecutions whose worker is the test, and readers of them as the instance has."""

    def __init__(self, ends: Ends, *, decoupled: bool = False) -> None:
        config = DECOUPLED if decoupled else CONFIG
        self.executions = WorkerExecutions(RequestEncoder(config, 1), "m_0_0", ends.link, {}, ends)
        self.begun = 0

    async def begin(self, sink: ResponseStream | None = None) -> "asyncio.Task[list[Answer]]":
        """Begin an execution of one request, whose number is its own; a task reads it."""
        self.begun += 1
        reading = asyncio.create_task(self._read(replace(text_request(), sink=sink)))
        await asyncio.sleep(0)
        return reading

    async def _read(self, request: InferRequest) -> list[Answer]:
        every: list[Answer] = []
        found = await self.executions.begin([request], [0])
        try:
            while found.has_more:
                every += await found.answers()
        finally:
            self.executions.release(found)
            await found.until_returned()
        return [each for each in every if each[1] is not Note.FREED]

    def executed(self, *numbers: int) -> None:
        """The worker has executed these; all of it comes in one read."""
        for number in numbers:
            answers = [[number, ANSWER, True, False]]
            self.executions.take_executed([5, number, None, answers, 1000], BODY)
        self.executions.after_read()


async def leave(reading: "asyncio.Task[list[Answer]]") -> None:
    """Cancel the task of an execution: its client has disconnected."""
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await soon(reading)
