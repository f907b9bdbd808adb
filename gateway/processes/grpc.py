"""An RPC that has come to a frontend process, answered by a method here."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from gateway.errors import UNEXPECTED
from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import Call, ClientGone, Metadata, RpcError, Status
from gateway.processes.call_end import CallEnd
from gateway.processes.channel import Channel
from gateway.processes.frames import Frame, headed, read_headed
from gateway.processes.kinds import Kind
from gateway.processes.messages import read, writable, written

log = logging.getLogger("sluice.grpc")


class GrpcCall(Call, CallEnd):
    """One RPC on frames; its task is cancelled when the client has left.

    It hears what comes from the time it is made, and must be run.
    """

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        head, message = read_headed(payload)
        loop = asyncio.get_running_loop()
        super().__init__(channel, call)
        self._metadata = read(head["metadata"])
        self._peer: str = head["peer"]
        secs: float | None = head["secs"]
        self._deadline = None if secs is None else loop.time() + secs
        self._messages: deque[bytes | None] = deque((message, None) if head["whole"] else ())
        self._trailing: Metadata = ()
        self._is_gone = False
        self._task: asyncio.Task[None] | None = None
        self._ended: Callable[[], None] | None = None
        self.path: str = head["path"]
        channel.join(call, self)

    @property
    def metadata(self) -> Metadata:
        return self._metadata

    @property
    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return self._deadline - asyncio.get_running_loop().time()

    async def send(self, messages: Sequence[bytes]) -> None:
        self._refuse_if_gone()
        for message in messages:
            self._send_data(message)
        if not self._window.has_room:
            await self._window.room()
            self._refuse_if_gone()

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._refuse_if_gone()
        self._channel.send(Kind.HEAD, self._call, headed(written(metadata)))

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def on_end(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def _take(self, frame: Frame) -> None:
        if frame.kind in (Kind.DATA, Kind.END):
            self._messages.append(frame.payload if frame.kind == Kind.DATA else None)
        else:
            self.lose()
        self._wake()

    def lose(self) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._messages.append(None)
        self._window.close()
        self._wake()
        if self._task is not None:
            self._task.cancel()

    async def run(self, method: Method) -> None:
        """Have the method answer, and say how that has ended."""
        self._task = asyncio.current_task()
        status, details = Status.INTERNAL, UNEXPECTED.message
        try:
            self._refuse_if_gone()
            await self._answer(method)
            status, details = Status.OK, ""
        except RpcError as error:
            status, details = error.status, error.details
        except ClientGone:
            return
        except Exception:
            # Around one request in a frontend: the client learns nothing of what is in the log.
            log.exception("request failed unexpectedly")
        finally:
            if not self._is_gone:
                self._end(status, details)
            self._channel.leave(self._call)
            if self._ended is not None:
                self._ended()

    async def _answer(self, method: Method) -> None:
        if not method.unary:
            await method.run(self._received(), self)
            return
        message = self._messages[0]
        assert message is not None  # noqa: S101 - the frontend sends what is unary with its message
        self._channel.send(Kind.DATA, self._call, await method.answer(message, self))

    async def _received(self) -> AsyncIterator[bytes]:
        while (message := await self._next()) is not None:
            self._passed_on(len(message))
            yield message

    async def _next(self) -> bytes | None:
        while not self._messages:
            await self._news()
        return self._messages.popleft()

    def _end(self, status: Status, details: str = "") -> None:
        if status is Status.OK and not self._trailing:
            self._channel.send(Kind.END, self._call)
            return
        said = {
            "status": status,
            "details": writable(details),
            "metadata": written(self._trailing),
        }
        self._channel.send(Kind.END, self._call, headed(said))

    def _refuse_if_gone(self) -> None:
        if self._is_gone:
            raise ClientGone
