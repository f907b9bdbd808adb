"""A request in one process, and its answer from another: both ends, on one connection."""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from itertools import count

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.openai_contract import OpenAiRefusal
from gateway.processes.channel import Channel, Frame
from gateway.processes.error_messages import read_error
from gateway.processes.inference_calls import (
    AnsweringEnd,
    InferenceKind,
    RequestingEnd,
    Respond,
    request_payload,
)
from gateway.processes.inference_messages import write_response
from gateway.processes.text_runs import take_run
from gateway.processes.windows import WINDOW_BYTES
from tests.builders import settle, soon, text_request, text_response, texts


class Far:
    """The other process: `respond` answers every call."""

    def __init__(self) -> None:
        self.channel = Channel(self._hear)
        self.tasks: list[asyncio.Task[None]] = []
        self.asked = asyncio.Event()
        self.respond: Respond = echo

    def _hear(self, frame: Frame) -> None:
        if frame.kind == InferenceKind.REQUEST:
            call = AnsweringEnd(self.channel, frame.call, frame.payload)
            call.task = asyncio.create_task(call.run(self.respond))
            call.task.add_done_callback(lambda _: self.channel.leave(frame.call))
            self.tasks.append(call.task)
            self.asked.set()

    async def ended(self) -> None:
        """Wait until every task there has ended, however."""
        await soon(asyncio.wait(self.tasks))


class Near:
    """The server."""

    def __init__(self) -> None:
        self.channel = Channel(lambda frame: self.strays.append(frame))
        self.strays: list[Frame] = []
        self._numbers = count(1)

    def call(self, request: InferRequest | None = None) -> RequestingEnd:
        number, payload = next(self._numbers), request_payload(request or text_request("hello"))
        self.channel.send(InferenceKind.REQUEST, number, payload)
        return RequestingEnd(self.channel, number, "model 'text': its engine")

    async def read(self, call: RequestingEnd) -> list[str]:
        """All of a call, to its end."""
        return texts([response async for response in call.responses()])


async def echo(request: InferRequest) -> AsyncGenerator[InferResponse, None]:
    (tensor,) = request.inputs
    yield text_response(tensor.elements()[0].decode())
    yield text_response("", final=True)


@pytest.fixture
async def far() -> Far:
    return Far()


@pytest.fixture
async def near(far: Far) -> AsyncIterator[Near]:
    loop, near = asyncio.get_running_loop(), Near()
    one, other = socket.socketpair()
    await loop.create_unix_connection(lambda: near.channel, sock=one)
    await loop.create_unix_connection(lambda: far.channel, sock=other)
    yield near
    for channel in (near.channel, far.channel):
        channel.close()
        await soon(channel.lost())


async def test_responses_come_in_their_order_and_end(near: Near, far: Far) -> None:
    assert await soon(near.read(near.call())) == ["hello", ""]
    await far.ended()


async def test_a_final_response_ends_a_call_before_its_end(near: Near, far: Far) -> None:
    call = near.call()
    async for response in call.responses():
        assert call.is_over is response.final
    assert call.leave() == 0
    await far.ended()
    await soon(near.read(near.call()))
    assert {frame.kind for frame in near.strays} <= {InferenceKind.END}
    assert not any(task.cancelled() for task in far.tasks)


@pytest.mark.parametrize("size", [1000, 2 * WINDOW_BYTES])
async def test_the_answering_task_ends_after_a_final_response_of_any_size(
    near: Near, far: Far, size: int
) -> None:
    async def answer(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("x" * size, final=True)

    far.respond = answer
    call = near.call()
    assert len([each async for each in call.responses()]) == 1
    call.leave()
    await soon(asyncio.gather(*far.tasks))


async def test_calls_side_by_side_get_their_own(near: Near, far: Far) -> None:
    calls = [near.call(text_request(f"text {index}")) for index in range(50)]
    found = await soon(asyncio.gather(*map(near.read, calls)))
    assert [text for text, _ in found] == [f"text {index}" for index in range(50)]


@pytest.mark.parametrize("received_ago_us", [0, 1_000_000])
async def test_a_timeout_that_has_begun_is_shorter_in_the_other_process(
    near: Near, far: Far, received_ago_us: int
) -> None:
    timeouts: list[int] = []

    async def records(request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        timeouts.append(request.timeout_us)
        yield text_response("")

    far.respond = records
    received_ns = time.perf_counter_ns() - 1000 * received_ago_us if received_ago_us else 0
    request = text_request(timeout_us=60_000_000, received_ns=received_ns)
    await soon(near.read(near.call(request)))
    (left_us,) = timeouts
    assert 60_000_000 - received_ago_us - 30_000_000 < left_us <= 60_000_000 - received_ago_us
    assert (left_us == request.timeout_us) is (received_ns == 0)


async def test_an_error_comes_after_what_was_said_before_it(near: Near, far: Far) -> None:
    async def fails(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("first")
        raise OpenAiRefusal(Code.INVALID_ARG, "no", status=400, body=b"{}")

    far.respond = fails
    responses = near.call().responses()
    assert texts([await soon(anext(responses))]) == ["first"]
    with pytest.raises(OpenAiRefusal, match="no"):
        await soon(anext(responses))


async def test_a_defect_is_logged_and_told_without_its_text(
    near: Near, far: Far, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("first")
        raise LookupError("secret")

    far.respond = breaks
    with caplog.at_level(logging.ERROR), pytest.raises(InferenceError) as caught:
        await soon(near.read(near.call()))
    assert (caught.value.code, "secret" in caught.value.message) == (Code.INTERNAL, False)
    assert "secret" in caplog.text


async def test_a_call_that_is_cancelled_in_its_process_ends_with_an_error(
    near: Near, far: Far
) -> None:
    async def cancelled(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("first")
        raise asyncio.CancelledError

    far.respond = cancelled
    with pytest.raises(InferenceError) as caught:
        await soon(near.read(near.call()))
    assert caught.value.code is Code.INTERNAL
    far.respond = echo
    assert await soon(near.read(near.call())) == ["hello", ""]


async def test_a_call_that_the_process_cannot_begin_ends_with_an_error(
    near: Near, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.respond = echo
    with monkeypatch.context() as broken:
        broken.setattr(far, "asked", None)
        with pytest.raises(InferenceError) as caught:
            await soon(near.read(near.call()))
    await far.ended()
    assert caught.value.code is Code.INTERNAL
    assert await soon(near.read(near.call())) == ["hello", ""]


async def test_a_cancelled_call_ends_the_execution(near: Near, far: Far) -> None:
    closed = asyncio.Event()

    async def endless(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        try:
            while True:
                yield text_response("more")
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    far.respond = endless
    call = near.call()
    await soon(anext(call.responses()))
    call.leave()
    await soon(closed.wait())
    await far.ended()
    assert InferenceKind.REFUSED not in [frame.kind for frame in near.strays]


async def test_cancelling_a_call_returns_the_number_of_unread_tokens(near: Near, far: Far) -> None:
    async def talks(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        for _ in range(3):
            yield replace(text_response("word"), usage=Usage(completion_tokens=2))
        await asyncio.Event().wait()

    far.respond = talks
    call = near.call()
    await soon(anext(call.responses()))
    await settle()
    assert call.leave() == 4
    await far.ended()


async def test_unread_texts_of_a_frame_count_as_unread_tokens(near: Near, far: Far) -> None:
    async def waits(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("first")
        await asyncio.Event().wait()

    far.respond = waits
    call = near.call()
    await soon(anext(call.responses()))
    run = take_run(deque(text_response(each, tokens=2) for each in "abc"))
    assert run is not None
    for _ in range(2):
        far.channel.send(InferenceKind.TEXTS, 1, run)
    assert texts([await soon(anext(call.responses()))]) == ["a"]
    await settle()
    assert call.leave() == 10
    await far.ended()


async def test_a_call_cancelled_at_once_ends_the_execution(near: Near, far: Far) -> None:
    near.call().leave()
    await soon(far.asked.wait())
    await far.ended()


async def test_cancelling_a_call_after_its_end_sends_nothing(near: Near, far: Far) -> None:
    call = near.call()
    await soon(near.read(call))
    call.leave()
    heard: list[Frame] = []
    far.channel.join(1, heard.append)  # type: ignore[arg-type]
    await settle()
    assert heard == []


async def test_a_slow_reader_blocks_the_producer(near: Near, far: Far) -> None:
    size, sent = WINDOW_BYTES // 8, 0

    async def large(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        nonlocal sent
        for _ in range(40):
            sent += 1
            yield text_response("x" * size)

    far.respond = large
    call = near.call()
    responses = call.responses()
    await soon(anext(responses))
    await asyncio.sleep(0.2)
    assert sent <= 10
    assert len([each async for each in responses]) == 39


@pytest.mark.parametrize("kind", [InferenceKind.DATA, InferenceKind.TEXTS], ids=["data", "texts"])
async def test_a_process_that_sends_beyond_the_window_ends_its_call(
    near: Near, far: Far, kind: int
) -> None:
    async def first(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("first")
        await asyncio.Event().wait()

    far.respond = first
    call = near.call()
    await soon(anext(call.responses()))
    response = text_response("x" * (WINDOW_BYTES // 4))
    texts_of_one = take_run(deque([response]))
    assert texts_of_one is not None
    data = write_response(response) if kind == InferenceKind.DATA else texts_of_one
    for _ in range(8):
        far.channel.send(kind, 1, data)
    await far.ended()
    assert [call.take() is None for _ in range(4)] == [False] * 4
    with pytest.raises(InferenceError, match="internal error"):
        call.take()


async def test_without_the_other_process_a_call_ends_with_an_error(near: Near, far: Far) -> None:
    async def waits(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("first")
        await asyncio.Event().wait()

    far.respond = waits
    call = near.call()
    responses = call.responses()
    await soon(anext(responses))
    far.channel.close()
    with pytest.raises(InferenceError, match="'text': its engine has stopped") as caught:
        await soon(anext(responses))
    assert caught.value.code is Code.UNAVAILABLE
    call.leave()
    with pytest.raises(InferenceError, match="its engine has stopped"):
        await soon(near.read(near.call()))


async def test_a_closed_channel_ends_the_execution(near: Near, far: Far) -> None:
    async def waits(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        yield text_response("first")
        await asyncio.Event().wait()

    far.respond = waits
    await soon(anext(near.call().responses()))
    near.channel.close()
    await far.ended()


async def test_a_malformed_request_is_refused_and_its_neighbours_are_answered(
    near: Near, far: Far
) -> None:
    neighbour = near.call()
    near.channel.send(InferenceKind.REQUEST, 9, b"\x91\xa1m")
    assert await soon(near.read(neighbour)) == ["hello", ""]
    await far.ended()
    await settle()
    (refusal,) = near.strays
    assert (refusal.kind, refusal.call) == (InferenceKind.REFUSED, 9)
    message = read_error(refusal.payload).message
    assert message.startswith("malformed request of another process: Expected `array` of at least")


async def test_a_malformed_response_ends_the_request_and_its_execution(
    near: Near, far: Far
) -> None:
    closed = asyncio.Event()

    async def waits(_: InferRequest) -> AsyncGenerator[InferResponse, None]:
        try:
            yield text_response("first")
            await asyncio.Event().wait()
        finally:
            closed.set()

    far.respond = waits
    call = near.call()
    responses = call.responses()
    await soon(anext(responses))
    for _ in range(2):
        far.channel.send(InferenceKind.DATA, 1, b"\x91\xc3")
    with pytest.raises(InferenceError, match=r"malformed response of another process: .*got 1"):
        await soon(anext(responses))
    assert call.leave() == 0
    await soon(closed.wait())
