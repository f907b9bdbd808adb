"""An RPC that has come to a frontend process, answered by a method here."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gateway.errors import UNEXPECTED
from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import ClientDisconnected, Metadata, RpcCall, RpcError, StatusCode
from gateway.processes.call import ChannelCall
from gateway.processes.channel import Channel, Frame, headed, read_headed
from gateway.processes.messages import FrontendKind, read, writable, written
from gateway.processes.relayed_call import RelayedCall, RelayedCalls, ServerDisconnected, beside

log = logging.getLogger("sluice.grpc")


class GrpcCall(RpcCall, ChannelCall):
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
        self._channel.send(FrontendKind.HEAD, self._call, headed(written(metadata)))

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def on_end(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def _take(self, frame: Frame) -> None:
        if frame.kind in (FrontendKind.DATA, FrontendKind.END):
            self._messages.append(frame.payload if frame.kind == FrontendKind.DATA else None)
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
        status, details = StatusCode.INTERNAL, UNEXPECTED.message
        try:
            self._refuse_if_gone()
            await self._answer(method)
            status, details = StatusCode.OK, ""
        except RpcError as error:
            status, details = error.status, error.details
        except ClientDisconnected:
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
        self._channel.send(FrontendKind.DATA, self._call, await method.answer(message, self))

    async def _received(self) -> AsyncIterator[bytes]:
        while (message := await self._next()) is not None:
            self._passed_on(len(message))
            yield message

    async def _next(self) -> bytes | None:
        while not self._messages:
            await self._news()
        return self._messages.popleft()

    def _end(self, status: StatusCode, details: str = "") -> None:
        if status is StatusCode.OK and not self._trailing:
            self._channel.send(FrontendKind.END, self._call)
            return
        said = {
            "status": status,
            "details": writable(details),
            "metadata": written(self._trailing),
        }
        self._channel.send(FrontendKind.END, self._call, headed(said))

    def _refuse_if_gone(self) -> None:
        if self._is_gone:
            raise ClientDisconnected


Shape = Sequence[Any]
"""Of one method: its path, whether the client streams, the server does, and answers compress."""


def shapes(methods: Mapping[str, Method]) -> list[Shape]:
    """What a frontend process has to know of the server's methods."""
    return [
        (path, each.client_streams, each.server_streams, each.compresses)
        for path, each in methods.items()
    ]


def relaying(
    found: Iterable[Shape], calls: RelayedCalls, send_timeout_secs: float
) -> Mapping[str, Method]:
    """Methods of these shapes, which the server answers.

    When one has failed, a client has so many seconds to take what came before that.
    """
    return {
        path: Method(
            serve=_Relay(calls, path, send_timeout_secs if answers else None).serve,
            parse=bytes,
            serialize=bytes,
            client_streams=asks,
            server_streams=answers,
            compresses=compresses,
        )
        for path, asks, answers, compresses in found
    }


class _Relay:
    """One method."""

    def __init__(self, calls: RelayedCalls, path: str, send_timeout_secs: float | None) -> None:
        self._calls = calls
        self._path = path
        self._send_timeout_secs = send_timeout_secs

    async def serve(self, asked: bytes | AsyncIterator[bytes], call: RpcCall) -> bytes | None:
        """Have the server answer; what it answers with if that is one message."""
        with self._calls.new() as relayed:
            if isinstance(asked, bytes):
                relayed.begin(FrontendKind.GRPC_CALL, self._head(call, whole=True), asked)
                return await self._answer(relayed, call)
            relayed.begin(FrontendKind.GRPC_CALL, self._head(call, whole=False))
            async with beside(_send_messages(asked, relayed)):
                return await self._answer(relayed, call)

    def _head(self, call: RpcCall, *, whole: bool) -> Mapping[str, Any]:
        return {
            "path": self._path,
            "metadata": written(call.metadata),
            "peer": call.peer,
            "secs": call.time_remaining(),
            "whole": whole,
        }

    async def _answer(self, relayed: RelayedCall, call: RpcCall) -> bytes | None:
        messages: list[bytes] = []
        while True:
            try:
                frames = await relayed.frames()
            except ServerDisconnected:
                raise RpcError(StatusCode.UNAVAILABLE, "Server exiting") from None
            for frame in frames:
                if frame.kind == FrontendKind.DATA:
                    messages.append(frame.payload)
                elif frame.kind == FrontendKind.HEAD:
                    await call.send_initial_metadata(read(read_headed(frame.payload)[0]))
            if messages and self._send_timeout_secs is not None:
                await self._send(messages, relayed, call, self._send_timeout_secs)
                messages = []
            if frames[-1].kind == FrontendKind.ABORT:
                raise RpcError(StatusCode.INTERNAL, UNEXPECTED.message)
            if frames[-1].kind == FrontendKind.END:
                _end(frames[-1], call)
                return messages[0] if messages else None

    async def _send(
        self, messages: Sequence[bytes], relayed: RelayedCall, call: RpcCall, within_secs: float
    ) -> None:
        """Send messages; if the call fails meanwhile, what is not taken in time is dropped."""
        time = asyncio.get_running_loop().time
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as patience:
                relayed.on_failure(lambda: patience.reschedule(time() + within_secs))
                await call.send(messages)
        relayed.on_failure(_nothing)
        for message in messages:
            relayed.passed_on(len(message))


def _nothing() -> None:
    """Called when a call fails of which nothing is being sent."""


def _end(frame: Frame, call: RpcCall) -> None:
    """End the RPC as the server has; RpcError if it failed."""
    if not frame.payload:
        return
    said, _ = read_headed(frame.payload)
    call.set_trailing_metadata(read(said["metadata"]))
    if said["status"] != StatusCode.OK:
        raise RpcError(StatusCode(said["status"]), said["details"])


async def _send_messages(messages: AsyncIterator[bytes], relayed: RelayedCall) -> None:
    async for message in messages:
        await relayed.send(message)
    relayed.end()
