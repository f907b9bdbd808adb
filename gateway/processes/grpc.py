"""RPCs of a frontend process: relayed there, answered in the server."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gateway.errors import exiting, unexpected
from gateway.frontends.grpc.rpc import ClientDisconnected, Method, RpcCall
from gateway.frontends.grpc.status import Metadata, RpcError, StatusCode, rpc_error
from gateway.processes.channel import Channel, ChannelCall, Frame, headed, read_headed
from gateway.processes.messages import FrontendKind, encodable, metadata_pairs, read_metadata
from gateway.processes.relayed_call import (
    RelayedCall,
    RelayedCalls,
    ServerDisconnected,
    concurrently,
)

log = logging.getLogger("sluice.grpc")


class GrpcCall(RpcCall, ChannelCall):
    """The server's end of an RPC: a call on frames, cancelled when the client disconnects.

    It receives frames from its creation, and must be run.
    """

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        head, message = read_headed(payload)
        loop = asyncio.get_running_loop()
        RpcCall.__init__(self)
        ChannelCall.__init__(self, channel, call)
        self._metadata = read_metadata(head["metadata"])
        self._peer: str = head["peer"]
        self._authority: str = head["authority"]
        self._certificate: str | None = head.get("certificate")
        secs: float | None = head["secs"]
        self._deadline = None if secs is None else loop.time() + secs
        self._messages: deque[bytes | None] = deque((message, None) if head["whole"] else ())
        self._trailing: Metadata = ()
        self._is_disconnected = False
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

    @property
    def authority(self) -> str:
        return self._authority

    @property
    def certificate(self) -> str | None:
        return self._certificate

    def time_remaining(self) -> float | None:
        if self._deadline is None:
            return None
        return self._deadline - asyncio.get_running_loop().time()

    async def send(self, messages: Sequence[bytes]) -> None:
        self._require_client()
        for message in messages:
            self._send_data(message)
        if not self._window.has_room:
            await self._window.room()
            self._require_client()

    def write(self, messages: Sequence[bytes]) -> bool:
        if self._is_disconnected or not self._window.has_room:
            return False
        for message in messages:
            self._send_data(message)
        return True

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._require_client()
        self._channel.send(FrontendKind.HEAD, self._call, headed(metadata_pairs(metadata)))

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
        if self._is_disconnected:
            return
        self._is_disconnected = True
        self._messages.append(None)
        self._window.close()
        self._wake()
        if self._task is not None:
            self._task.cancel()

    async def run(self, method: Method) -> None:
        """Answer by the method, and send the status."""
        self._task = asyncio.current_task()
        status, details = StatusCode.INTERNAL, unexpected().message
        try:
            self._require_client()
            await self._answer(method)
            status, details = StatusCode.OK, ""
        except RpcError as error:
            await error.due()
            status, details = error.status, error.details
            self._trailing = (*self._trailing, *error.trailers)
        except ClientDisconnected:
            return
        except Exception:
            # Around one request in a frontend: the text of the error stays in the log.
            log.exception("request failed unexpectedly")
        finally:
            if not self._is_disconnected:
                self._end(status, details)
            self._channel.leave(self._call)
            if self._ended is not None:
                self._ended()

    async def _answer(self, method: Method) -> None:
        if not method.unary:
            await method.run(self._received(), self)
            return
        message = self._messages[0]
        assert message is not None  # noqa: S101 - the frontend sends a unary RPC with its message
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
            "details": encodable(details),
            "metadata": metadata_pairs(self._trailing),
        }
        self._channel.send(FrontendKind.END, self._call, headed(said))

    def _require_client(self) -> None:
        if self._is_disconnected:
            raise ClientDisconnected


Shape = Sequence[Any]
"""Path, client streams, server streams, answers are compressed."""


def shapes(methods: Mapping[str, Method]) -> list[Shape]:
    """The shapes of methods, for a frontend process."""
    return [
        (path, each.client_streams, each.server_streams, each.compresses)
        for path, each in methods.items()
    ]


def relaying(
    found: Iterable[Shape], calls: RelayedCalls, send_timeout_secs: float
) -> Mapping[str, Method]:
    """Methods that relay RPCs to the server.

    After a failure a client has `send_timeout_secs` to read the messages sent before it.
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
    """The frontend's end of the RPCs of one method."""

    def __init__(self, calls: RelayedCalls, path: str, send_timeout_secs: float | None) -> None:
        self._calls = calls
        self._path = path
        self._send_timeout_secs = send_timeout_secs

    async def serve(self, asked: bytes | AsyncIterator[bytes], call: RpcCall) -> bytes | None:
        """Relay an RPC; the answer if it is one message, else None."""
        with self._calls.new() as relayed:
            if isinstance(asked, bytes):
                relayed.begin(FrontendKind.GRPC_CALL, self._head(call, whole=True), asked)
                return await self._answer(relayed, call)
            relayed.begin(FrontendKind.GRPC_CALL, self._head(call, whole=False))
            async with concurrently(_send_messages(asked, relayed)):
                return await self._answer(relayed, call)

    def _head(self, call: RpcCall, *, whole: bool) -> Mapping[str, Any]:
        found = {
            "path": self._path,
            "metadata": metadata_pairs(call.metadata),
            "peer": call.peer,
            "authority": encodable(call.authority),
            "secs": call.time_remaining(),
            "whole": whole,
        }
        if call.certificate is not None:
            found["certificate"] = encodable(call.certificate)
        return found

    async def _answer(self, relayed: RelayedCall, call: RpcCall) -> bytes | None:
        messages: list[bytes] = []
        while True:
            try:
                frames = await relayed.frames()
            except ServerDisconnected:
                raise rpc_error(exiting()) from None
            for frame in frames:
                if frame.kind == FrontendKind.DATA:
                    messages.append(frame.payload)
                elif frame.kind == FrontendKind.HEAD:
                    await call.send_initial_metadata(read_metadata(read_headed(frame.payload)[0]))
            if messages and self._send_timeout_secs is not None:
                await self._send(messages, relayed, call, self._send_timeout_secs)
                messages = []
            if frames[-1].kind == FrontendKind.ABORT:
                raise RpcError(StatusCode.INTERNAL, unexpected().message)
            if frames[-1].kind == FrontendKind.END:
                _end(frames[-1], call)
                return messages[0] if messages else None

    async def _send(
        self, messages: Sequence[bytes], relayed: RelayedCall, call: RpcCall, within_secs: float
    ) -> None:
        """Send messages; if the call fails meanwhile, drop those unread after the timeout."""
        time = asyncio.get_running_loop().time
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as timeout:
                relayed.on_failure(lambda: timeout.reschedule(time() + within_secs))
                await call.send(messages)
        relayed.on_failure(_nothing)
        for message in messages:
            relayed.passed_on(len(message))


def _nothing() -> None:
    """The function of `on_failure` while no message is being sent."""


def _end(frame: Frame, call: RpcCall) -> None:
    """Apply the status and the metadata of the server; RpcError unless OK."""
    if not frame.payload:
        return
    said, _ = read_headed(frame.payload)
    call.set_trailing_metadata(read_metadata(said["metadata"]))
    if said["status"] != StatusCode.OK:
        raise RpcError(StatusCode(said["status"]), said["details"])


async def _send_messages(messages: AsyncIterator[bytes], relayed: RelayedCall) -> None:
    async for message in messages:
        await relayed.send(message)
    relayed.end()
