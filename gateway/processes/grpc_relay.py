"""The methods of a frontend process: every RPC is answered by the server."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gateway.errors import UNEXPECTED
from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import Call, RpcError, Status
from gateway.processes.frames import Frame, read_headed
from gateway.processes.kinds import Kind
from gateway.processes.messages import read, written
from gateway.processes.relayed_call import Calls, RelayedCall, ServerGone, beside

Shape = Sequence[Any]
"""Of one method: its path, whether the client streams, the server does, and answers compress."""


def shapes(methods: Mapping[str, Method]) -> list[Shape]:
    """What a frontend process has to know of the server's methods."""
    return [
        (path, each.client_streams, each.server_streams, each.compresses)
        for path, each in methods.items()
    ]


def relaying(
    found: Iterable[Shape], calls: Calls, send_timeout_secs: float
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

    def __init__(self, calls: Calls, path: str, send_timeout_secs: float | None) -> None:
        self._calls = calls
        self._path = path
        self._send_timeout_secs = send_timeout_secs

    async def serve(self, asked: bytes | AsyncIterator[bytes], call: Call) -> bytes | None:
        """Have the server answer; what it answers with if that is one message."""
        with self._calls.new() as relayed:
            if isinstance(asked, bytes):
                relayed.begin(Kind.GRPC_CALL, self._head(call, whole=True), asked)
                return await self._answer(relayed, call)
            relayed.begin(Kind.GRPC_CALL, self._head(call, whole=False))
            async with beside(_send_messages(asked, relayed)):
                return await self._answer(relayed, call)

    def _head(self, call: Call, *, whole: bool) -> Mapping[str, Any]:
        return {
            "path": self._path,
            "metadata": written(call.metadata),
            "peer": call.peer,
            "secs": call.time_remaining(),
            "whole": whole,
        }

    async def _answer(self, relayed: RelayedCall, call: Call) -> bytes | None:
        messages: list[bytes] = []
        while True:
            try:
                frames = await relayed.frames()
            except ServerGone:
                raise RpcError(Status.UNAVAILABLE, "Server exiting") from None
            for frame in frames:
                if frame.kind == Kind.DATA:
                    messages.append(frame.payload)
                elif frame.kind == Kind.HEAD:
                    await call.send_initial_metadata(read(read_headed(frame.payload)[0]))
            if messages and self._send_timeout_secs is not None:
                await self._send(messages, relayed, call, self._send_timeout_secs)
                messages = []
            if frames[-1].kind == Kind.ABORT:
                raise RpcError(Status.INTERNAL, UNEXPECTED.message)
            if frames[-1].kind == Kind.END:
                _end(frames[-1], call)
                return messages[0] if messages else None

    async def _send(
        self, messages: Sequence[bytes], relayed: RelayedCall, call: Call, within_secs: float
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


def _end(frame: Frame, call: Call) -> None:
    """End the RPC as the server has; RpcError if it failed."""
    if not frame.payload:
        return
    said, _ = read_headed(frame.payload)
    call.set_trailing_metadata(read(said["metadata"]))
    if said["status"] != Status.OK:
        raise RpcError(Status(said["status"]), said["details"])


async def _send_messages(messages: AsyncIterator[bytes], relayed: RelayedCall) -> None:
    async for message in messages:
        await relayed.send(message)
    relayed.end()
