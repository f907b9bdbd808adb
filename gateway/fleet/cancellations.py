"""Cancellations of requests by their ids at another router."""

import asyncio
from contextlib import suppress

import msgspec

from gateway.fleet.handshake import FleetKind
from gateway.fleet.peers import PeerRouter, RouterAbsent
from gateway.processes.channel import Channel, Frame, Receiver
from gateway.request_name import RequestName

CANCEL_SECS = 2.0
"""Time limit from a call to its answer. Routers of an earlier release do not answer."""

MOST_NAME_BYTES = 64 << 10

encode = msgspec.msgpack.Encoder().encode
decode_name = msgspec.msgpack.Decoder(RequestName).decode
_decode_answer = msgspec.msgpack.Decoder(bool).decode


async def cancelled_at(peer: PeerRouter, name: RequestName) -> bool:
    """Whether the other router ran a request of that name: it has been cancelled.

    False if that router cannot be reached, or does not answer, and for a name of more than
    MOST_NAME_BYTES, since a frame that is too long ends the link.
    """
    if len(encode(name)) > MOST_NAME_BYTES:
        return False
    peer.calls += 1
    try:
        channel = await peer.channel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECS):
                return await _CancelCall(channel, next(peer.numbers)).answer(name)
    except RouterAbsent:
        pass
    finally:
        peer.calls -= 1
    return False


class _CancelCall(Receiver):
    """A call that cancels a request."""

    def __init__(self, channel: Channel, call: int) -> None:
        self._channel = channel
        self._call = call
        self._answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(self, name: RequestName) -> bool:
        """Make the call, and return its answer; False if the other router fails or is lost."""
        self._channel.join(self._call, self)
        self._channel.send(FleetKind.CANCEL, self._call, encode(name))
        try:
            return await self._answer
        finally:
            self._channel.leave(self._call)

    def hear(self, frame: Frame) -> None:
        self._set(frame.kind == FleetKind.CANCELLED and _decode_answer(frame.payload))

    def lose(self) -> None:
        self._set(False)

    def _set(self, answer: bool) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)
