"""RPCs through both ends of a channel: messages, status, disconnects and windows."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest

from gateway.errors import unexpected
from gateway.frontends.grpc.rpc import ClientDisconnected, Method, RpcCall
from gateway.frontends.grpc.status import Metadata, RpcError, StatusCode, rpc_error
from gateway.processes.grpc import relaying, shapes
from gateway.processes.messages import FrontendKind
from tests.builders import settle, soon
from tests.gateway.processes.http_clients import Client, echo
from tests.gateway.processes.links import FITTING, PIECE, SEND_TIMEOUT_SECS, linked
from tests.gateway.processes.rpcs import (
    Asking,
    Rpc,
    Serve,
    answering,
    asked_frame,
    only,
    streaming,
    unary,
)


async def test_a_message_is_answered_with_a_message() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        call.set_trailing_metadata([("cost", "1"), ("cost-bin", b"\xff")])
        return asked + b"!"

    async with linked(method=unary(serve)) as link:
        rpc = Rpc()
        assert await soon(link.method.answer(b"\0\xff", rpc)) == b"\0\xff!"
        assert rpc.trailing == [("cost", "1"), ("cost-bin", b"\xff")]
        assert await soon(link.method.answer(b"", Rpc())) == b"!"


async def test_an_empty_answer_is_an_answer() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        return b""

    async with linked(method=unary(serve)) as link:
        assert await soon(link.method.answer(b"asked", Rpc())) == b""


async def test_the_method_sees_metadata_addresses_and_deadline_of_the_client() -> None:
    found: list[Any] = []

    async def serve(asked: bytes, call: RpcCall) -> bytes:
        found.append((call.metadata, call.peer, call.authority, call.time_remaining()))
        return b""

    metadata: Metadata = [("name", "caf\xe9 \N{SNOWMAN}"), ("trace-bin", b"\0\xff")]
    async with linked(method=unary(serve)) as link:
        await soon(link.method.answer(b"", Rpc(metadata, secs=1000.0)))
        await soon(link.method.answer(b"", Rpc()))
    addresses = ("ipv4:127.0.0.1:40000", "caf\xe9:8001")
    assert found[0][:3] == (metadata, *addresses)
    assert 900 < found[0][3] <= 1000
    assert found[1] == ([], *addresses, None)


async def test_messages_arrive_in_order_after_the_initial_metadata() -> None:
    more = asyncio.Event()

    async def serve(asked: bytes, call: RpcCall) -> None:
        await call.send_initial_metadata([("begun", "1"), ("begun-bin", b"\x80")])
        await call.send([asked, b""])
        await more.wait()
        await call.send([b"last"])

    async with linked(method=answering(serve)) as link:
        rpc = Rpc()
        running = asyncio.create_task(link.method.run(only(b"asked"), rpc))
        assert [await rpc.message(), await rpc.message()] == [b"asked", b""]
        assert rpc.initial == [[("begun", "1"), ("begun-bin", b"\x80")]]
        assert not running.done()
        more.set()
        await soon(running)
        assert rpc.untaken == [b"last"]


async def test_client_and_server_stream_concurrently() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        async for message in asked:
            await call.send([message])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking()
        running = asyncio.create_task(link.method.run(asking, rpc))
        for message in (b"one", b"", b"three"):
            asking.ask(message)
            assert await rpc.message() == message
        asking.half_close()
        await soon(running)


async def test_messages_may_follow_when_the_client_has_half_closed() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        found = [message async for message in asked]
        for message in found:
            await call.send([message])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking(b"one", b"two")
        asking.half_close()
        await soon(link.method.run(asking, rpc))
        assert rpc.untaken == [b"one", b"two"]


async def test_a_method_may_end_before_its_client_has_half_closed() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        await call.send([await anext(asked)])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking(b"one", b"two")
        await soon(link.method.run(asking, rpc))
        assert rpc.untaken == [b"one"]


@pytest.mark.parametrize("shape", [unary, answering])
async def test_an_error_has_its_trailing_metadata(shape: Callable[[Serve], Method]) -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        call.set_trailing_metadata([("why", "caf\xe9"), ("why-bin", b"\0\xff")])
        raise RpcError(StatusCode.DATA_LOSS, "caf\xe9 \N{SNOWMAN} is lost")

    async with linked(method=shape(serve)) as link:
        rpc = Rpc()
        with pytest.raises(RpcError) as caught:
            await soon(link.method.run(only(b""), rpc))
        assert caught.value.status is StatusCode.DATA_LOSS
        assert caught.value.details == "caf\xe9 \N{SNOWMAN} is lost"
        assert rpc.trailing == [("why", "caf\xe9"), ("why-bin", b"\0\xff")]


async def test_an_error_follows_the_messages_before_it() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        await call.send([await anext(asked)])
        raise RpcError(StatusCode.ABORTED)

    async with linked(method=streaming(serve)) as link:
        rpc = Rpc()
        with pytest.raises(RpcError) as caught:
            await soon(link.method.run(Asking(b"one"), rpc))
        assert (caught.value.status, caught.value.details) == (StatusCode.ABORTED, "")
        assert rpc.untaken == [b"one"]


async def test_the_text_of_an_unexpected_error_is_not_sent() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        raise ValueError("a secret")

    expected = rpc_error(unexpected())
    async with linked(method=unary(serve)) as link:
        with pytest.raises(RpcError) as caught:
            await soon(link.method.answer(b"", Rpc()))
    assert (caught.value.status, caught.value.details) == (expected.status, expected.details)


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_an_rpc_that_the_server_cannot_begin_ends_with_an_error(
    shape: Callable[[Serve], Method],
) -> None:
    async def serve(asked: Any, call: RpcCall) -> Any:
        raise AssertionError("the server does not know this path")

    async with linked() as link:
        shapes_of_other = shapes({"/test.Service/Other": shape(serve)})
        [method] = relaying(shapes_of_other, link.calls, SEND_TIMEOUT_SECS).values()
        with pytest.raises(RpcError) as caught:
            await soon(method.run(Asking(b"one"), Rpc()))
    assert (caught.value.status, caught.value.details) == (
        StatusCode.INTERNAL,
        unexpected().message,
    )


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_an_rpc_whose_method_is_cancelled_by_the_server_ends_with_an_error(
    shape: Callable[[Serve], Method],
) -> None:
    async def serve(asked: Any, call: RpcCall) -> Any:
        raise asyncio.CancelledError

    async with linked(method=shape(serve)) as link:
        with pytest.raises(RpcError) as caught:
            await soon(link.method.run(Asking(b"one"), Rpc()))
    assert (caught.value.status, caught.value.details) == (
        StatusCode.INTERNAL,
        unexpected().message,
    )


def waiting_for(begun: asyncio.Event, stopped: asyncio.Event) -> Serve:
    """A method that runs until it is cancelled."""

    async def serve(asked: Any, call: RpcCall) -> None:
        call.on_end(stopped.set)
        begun.set()
        await asyncio.Event().wait()

    return serve


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_a_disconnect_cancels_the_method(
    shape: Callable[[Serve], Method],
) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()
    async with linked(method=shape(waiting_for(begun, stopped))) as link:
        running = asyncio.create_task(link.method.run(Asking(b"one"), Rpc()))
        await soon(begun.wait())
        running.cancel()
        await soon(stopped.wait())
        await soon(asyncio.wait([running]))
        assert running.cancelled()


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_a_disconnect_in_the_turn_of_the_rpc_cancels_the_method(
    shape: Callable[[Serve], Method],
) -> None:
    async with linked(method=shape(waiting_for(asyncio.Event(), asyncio.Event()))) as link:
        link.frontend.send(FrontendKind.GRPC_CALL, 1, asked_frame(b"one"))
        link.frontend.send(FrontendKind.GONE, 1)
        await link.heard()
        await settle()
        assert link.is_idle


async def test_details_that_are_no_unicode_do_not_keep_an_rpc_from_ending() -> None:
    begun = asyncio.Event()

    async def serve(asked: bytes, call: RpcCall) -> bytes:
        begun.set()
        raise RpcError(StatusCode.ABORTED, "no file \udcff")

    async with linked(method=unary(serve)) as link:
        running = asyncio.create_task(link.method.answer(b"", Rpc()))
        await soon(begun.wait())
        await link.answered()
        await link.lose_server()
        with pytest.raises(RpcError) as caught:
            await soon(running)
        assert caught.value.status is StatusCode.ABORTED


async def test_many_messages_are_answered_with_a_message() -> None:
    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> bytes:
        return b"".join([message async for message in asked])

    method = Method(serve=serve, parse=bytes, serialize=bytes, client_streams=True)
    async with linked(method=method) as link:
        rpc, asking = Rpc(), Asking(b"one", b"two")
        asking.half_close()
        await soon(link.method.run(asking, rpc))
        assert rpc.untaken == [b"onetwo"]


@pytest.mark.parametrize("shape", [unary, answering, streaming])
async def test_an_rpc_ends_with_unavailable_when_the_server_disconnects(
    shape: Callable[[Serve], Method],
) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()
    async with linked(method=shape(waiting_for(begun, stopped))) as link:
        running = asyncio.create_task(link.method.run(Asking(b"one"), Rpc()))
        await soon(begun.wait())
        await link.lose_server()
        for each in (running, link.method.run(Asking(b"too late"), Rpc())):
            with pytest.raises(RpcError) as caught:
                await soon(each)
            assert caught.value.status is StatusCode.UNAVAILABLE
            assert caught.value.details == "Server exiting"
        await soon(stopped.wait())


async def test_sending_after_a_disconnect_fails() -> None:
    begun = asyncio.Event()
    refused: list[str] = []

    async def serve(asked: bytes, call: RpcCall) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for send in (call.send([b"late"]), call.send_initial_metadata([])):
                with pytest.raises(ClientDisconnected):
                    await send
                refused.append("once")

    async with linked(method=answering(serve)) as link:
        running = asyncio.create_task(link.method.run(only(b"one"), Rpc()))
        await soon(begun.wait())
        running.cancel()
        await link.answered()
        await soon(asyncio.wait([running]))
    assert len(refused) == 2


async def test_on_end_is_called_after_the_answer() -> None:
    ended: list[bool] = []

    async def serve(asked: bytes, call: RpcCall) -> bytes:
        call.on_end(lambda: ended.append(True))
        return b""

    async with linked(method=unary(serve)) as link:
        await soon(link.method.answer(b"", Rpc()))
        await link.answered()
        assert ended == [True]


async def test_a_slow_client_blocks_the_method_at_the_window() -> None:
    sent: list[int] = []

    async def serve(asked: bytes, call: RpcCall) -> None:
        for number in range(3 * FITTING):
            sent.append(number)
            await call.send([PIECE])

    async with linked(method=answering(serve)) as link:
        rpc = Rpc()
        rpc.takes.clear()
        running = asyncio.create_task(link.method.run(only(b""), rpc))
        await soon(rpc.offered.wait())
        await settle()
        assert len(sent) == FITTING
        rpc.takes.set()
        await soon(running)
        assert rpc.untaken == [PIECE] * 3 * FITTING


async def test_a_slow_method_blocks_the_client_at_the_window() -> None:
    begun, takes = asyncio.Event(), asyncio.Event()

    async def serve(asked: AsyncIterator[bytes], call: RpcCall) -> None:
        begun.set()
        await takes.wait()
        await call.send([b"%d" % len([message async for message in asked])])

    async with linked(method=streaming(serve)) as link:
        rpc, asking = Rpc(), Asking(*[PIECE] * 3 * FITTING)
        asking.half_close()
        running = asyncio.create_task(link.method.run(asking, rpc))
        await soon(begun.wait())
        await settle()
        assert asking.given == FITTING
        takes.set()
        await soon(running)
        assert rpc.untaken == [b"%d" % (3 * FITTING)]


async def test_rpcs_and_requests_share_a_channel() -> None:
    async def serve(asked: bytes, call: RpcCall) -> bytes:
        return b"rpc " + asked

    async with linked(echo, unary(serve)) as link:
        clients = [Client(link.app, b"%d" % n) for n in range(10)]
        rpcs: Iterable[Awaitable[bytes]] = [
            asyncio.ensure_future(link.method.answer(b"%d" % n, Rpc())) for n in range(10)
        ]
        assert await soon(asyncio.gather(*rpcs)) == [b"rpc %d" % n for n in range(10)]
        assert [await each.answer() for each in clients] == [b"%d" % n for n in range(10)]
