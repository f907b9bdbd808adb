"""A client may use all that the server's settings allow from the first RPC on."""

import asyncio

from hyperframe.frame import DataFrame, SettingsFrame

from gateway.frontends.grpc.rpc import Transport
from tests.http2 import Connection, message, request
from tests.interop.messages import SimpleResponse, unary

REQUEST_BYTES = 60_000
"""As much as the windows take that every connection begins with, and more than one frame."""

PATH = "/grpc.testing.TestService/UnaryCall"
SMALLEST_FRAME = 16_384
"""The limits of every peer before it sets others."""


def _answered(port: int) -> list[bytes]:
    """Ask in frames of the size that is allowed, in one write with the acknowledgement."""
    body = message(unary(9, REQUEST_BYTES).SerializeToString())
    with Connection(port) as connection:
        settings = connection.begin().receive()
        assert isinstance(settings, SettingsFrame)
        size = settings.settings.get(SettingsFrame.MAX_FRAME_SIZE, SMALLEST_FRAME)
        frames = [DataFrame(1, body[at : at + size]) for at in range(0, len(body), size)]
        frames[-1].flags.add("END_STREAM")
        headers = connection.headers(1, request(PATH))
        connection.send(SettingsFrame(0, flags=["ACK"]), headers, *frames)
        return connection.answer(1).messages


async def test_a_large_frame_may_follow_the_acknowledgement_at_once(transport: Transport) -> None:
    (answer,) = await asyncio.to_thread(_answered, transport.port)

    assert SimpleResponse.FromString(answer).payload.body == bytes(9)
