"""Messages of the server to a frontend process that are sent without waiting."""

import asyncio

from gateway.frontends.grpc.rpc import RpcCall
from tests.builders import soon
from tests.gateway.processes.links import FITTING, PIECE, linked
from tests.gateway.processes.rpcs import Rpc, answering, only


async def test_messages_are_sent_at_once_up_to_the_window() -> None:
    written: list[bool] = []

    async def serve(asked: bytes, call: RpcCall) -> None:
        await call.send([asked])
        while len(written) < 2 * FITTING and call.write([PIECE]):
            written.append(True)
        await call.send([b"last"])

    async with linked(method=answering(serve)) as link:
        rpc = Rpc()
        rpc.takes.clear()
        running = asyncio.create_task(link.method.run(only(b"asked"), rpc))
        await soon(rpc.offered.wait())
        await link.heard()
        assert len(written) == FITTING
        rpc.takes.set()
        await soon(running)
        assert rpc.untaken == [b"asked", *[PIECE] * FITTING, b"last"]


async def test_no_message_is_sent_at_once_after_a_disconnect() -> None:
    kept: list[RpcCall] = []

    async def serve(asked: bytes, call: RpcCall) -> None:
        kept.append(call)
        await call.send([asked])
        await asyncio.Event().wait()

    async with linked(method=answering(serve)) as link:
        rpc = Rpc()
        running = asyncio.create_task(link.method.run(only(b"asked"), rpc))
        await rpc.message()
        (call,) = kept
        assert call.write([b"one"])
        running.cancel()
        await soon(link.answered())
        assert not call.write([b"two"])
