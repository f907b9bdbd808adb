"""Events on the wire, and responses that end with their stream."""

import asyncio
import math
import threading
import time
from collections.abc import Callable

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.generate_codec import GenerateEncoder
from gateway.frontends.http.keep_alive import KEEP_ALIVE, silence_comment
from gateway.frontends.http.request_scope import WRITE_PIECE
from gateway.frontends.http.sse import GenerateEvents, SilenceFiller, event
from gateway.messages import InferResponse
from gateway.observability.receipt import STALL_NS, Receipt
from gateway.settings import HttpSettings
from gateway.stream import ResponseStream
from gateway.threads import Threads
from tests.builders import FLAG, settle, soon, text_response
from tests.conftest import tasks_left
from tests.exchange import Exchange

BROKEN = InferenceError(Code.INTERNAL, "broken")
PATIENT = HttpSettings(keep_alive_secs=60.0)


def says(text: str) -> bytes:
    return b'data: {"model_name":"m","model_version":"1","text_output":"%b"}\n\n' % text.encode()


@pytest.fixture
async def stream() -> ResponseStream:
    return ResponseStream(limit=3)


def streamed(
    stream: ResponseStream,
    first: list[InferResponse] | None = None,
    settings: HttpSettings = PATIENT,
) -> Exchange:
    encoder = GenerateEncoder("m", "1", "")
    return Exchange(GenerateEvents(stream, first, encoder, settings, Threads("encoding", 1)))


def test_an_event_is_one_line_of_data_and_an_empty_one() -> None:
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'


async def test_a_stream_becomes_events(stream: ResponseStream) -> None:
    stream.put(text_response("two", final=True))
    async with streamed(stream, [text_response("one")]) as exchange:
        status, headers = await exchange.start()
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-store"
        assert headers["x-accel-buffering"] == "no"
        assert await exchange.rest() == says("one") + says("two")
        await exchange.ended()
    assert stream.done
    assert tasks_left() == []


async def test_the_headers_go_before_a_first_response_that_is_late(stream: ResponseStream) -> None:
    async with streamed(stream, None) as exchange:
        assert (await exchange.start())[0] == 200
        stream.put(text_response("late", final=True))
        assert await exchange.rest() == says("late")


@pytest.mark.parametrize("first", [[], [FLAG]], ids=["nothing", "the flag"])
async def test_without_data_there_is_no_event(
    stream: ResponseStream, first: list[InferResponse]
) -> None:
    stream.put(FLAG)
    async with streamed(stream, first) as exchange:
        assert (await exchange.start())[0] == 200
        assert await exchange.rest() == b""


async def test_an_empty_final_response_is_no_event(stream: ResponseStream) -> None:
    stream.put(FLAG)
    async with streamed(stream, [text_response("one")]) as exchange:
        await exchange.start()
        assert await exchange.rest() == says("one")


async def test_responses_that_arrive_during_a_write_go_with_the_next_one(
    stream: ResponseStream,
) -> None:
    async with streamed(stream, [text_response("one")]) as exchange:
        await exchange.start()
        assert await exchange.chunk() == says("one")
        exchange.reads.clear()
        stream.put(text_response("two"))
        await settle()  # its write is under way, and stuck
        stream.put(text_response("three"))
        stream.put(text_response("four", final=True))
        exchange.reads.set()
        assert await exchange.chunk() == says("two")
        assert await exchange.chunk() == says("three") + says("four")
        assert await exchange.chunk() == b""


async def test_texts_that_come_together_are_one_write(stream: ResponseStream) -> None:
    written: list[bytes] = []
    exchange = streamed(stream, [text_response("one")])

    def write(piece: bytes) -> bool:
        written.append(piece)
        return len(written) == 1

    exchange.scope["state"][WRITE_PIECE] = write
    async with exchange:
        await exchange.start()
        assert await exchange.chunk() == says("one")
        await settle()
        stream.put_texts("text_output", (b"two", b"three"), (1, None))
        assert written == [says("two") + says("three")]
        stream.put_texts("text_output", (b"four", b"five"), (1, 1))
        stream.end()
        assert await exchange.rest() == says("four") + says("five")


@pytest.mark.parametrize(
    ("size", "thread"), [(100, "MainThread"), (4000, "MainThread"), (5000, "encoding_0")]
)
async def test_a_large_batch_is_encoded_in_a_thread(
    stream: ResponseStream, monkeypatch: pytest.MonkeyPatch, size: int, thread: str
) -> None:
    seen: list[str] = []

    def noting(encode: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        def noted(encoder: GenerateEncoder, response: InferResponse) -> bytes | None:
            found = encode(encoder, response)
            if found is not None:
                seen.append(threading.current_thread().name)
            return found

        return noted

    for name in ("encode", "encode_text"):
        monkeypatch.setattr(GenerateEncoder, name, noting(getattr(GenerateEncoder, name)))
    stream.end()
    async with streamed(stream, [text_response("x" * size)] * 20) as exchange:
        await exchange.start()
        assert await exchange.rest() == says("x" * size) * 20
    assert set(seen) == {thread}


async def test_an_error_is_the_last_event(stream: ResponseStream) -> None:
    stream.put(text_response("two"))
    stream.fail(BROKEN)
    async with streamed(stream, [text_response("one")]) as exchange:
        assert (await exchange.start())[0] == 200
        assert await exchange.rest() == (
            says("one") + says("two") + b'data: {"error":"broken"}\n\n'
        )


async def test_silence_is_filled_with_comments(stream: ResponseStream) -> None:
    settings = HttpSettings(keep_alive_secs=0.01)
    async with streamed(stream, None, settings) as exchange:
        await exchange.start()
        assert await exchange.chunk() == b": keep-alive\n\n"
        assert await exchange.chunk() == b": keep-alive\n\n"
        stream.put(text_response("at last", final=True))
        assert says("at last") in await exchange.rest()


async def test_a_comment_that_can_be_written_at_once_takes_no_task() -> None:
    written: list[bytes] = []
    began = asyncio.get_running_loop().time()

    def write(piece: bytes) -> bool:
        written.append(piece)
        return True

    async def put(piece: bytes) -> None:
        raise AssertionError("the comment was written")

    with SilenceFiller(put, write, 0.001, lambda: began, lambda: KEEP_ALIVE):
        while len(written) < 3:
            assert tasks_left() == []
            await asyncio.sleep(0.001)
    assert set(written) == {b": keep-alive\n\n"}


async def test_one_comment_at_a_time_waits_for_a_slow_client() -> None:
    put: list[bytes] = []

    async def wait(piece: bytes) -> None:
        put.append(piece)
        await asyncio.Event().wait()

    with SilenceFiller(wait, lambda piece: False, 0.001, lambda: 0.0, lambda: KEEP_ALIVE):
        await asyncio.sleep(0.01)
        assert put == [b": keep-alive\n\n"]
        assert len(tasks_left()) == 1
    await settle()
    assert tasks_left() == []


@pytest.mark.parametrize(
    ("left", "comment"),
    [
        (39.5, b": waiting for the model, about 40 s\n\n"),
        (-5, b": waiting for the model, about 1 s\n\n"),
        (math.inf, b": waiting for the model\n\n"),
    ],
)
async def test_the_comment_of_a_request_that_waits_for_a_replica_has_the_expected_seconds(
    left: float, comment: bytes
) -> None:
    assert silence_comment(asyncio.get_running_loop().time() + left) == comment
    assert silence_comment(None) == KEEP_ALIVE


async def test_no_comment_follows_the_end() -> None:
    put: list[bytes] = []
    sent = asyncio.Event()

    async def send(piece: bytes) -> None:
        put.append(piece)
        sent.set()

    with SilenceFiller(send, lambda piece: False, 0.001, lambda: 0.0, lambda: KEEP_ALIVE):
        await soon(sent.wait())  # the task has ended, and its callback is due
    await asyncio.sleep(0.01)
    assert len(put) == 1


async def test_the_wait_of_a_comment_is_no_stall_of_the_answer(stream: ResponseStream) -> None:
    receipt = Receipt(time.perf_counter_ns(), time.perf_counter_ns())
    encoder, settings = GenerateEncoder("m", "1", ""), HttpSettings(keep_alive_secs=0.001)
    events = GenerateEvents(stream, None, encoder, settings, Threads("encoding", 1))
    events.receipt = receipt
    async with Exchange(events) as exchange:
        await exchange.start()
        exchange.reads.clear()
        await asyncio.sleep(0.02)
        since_ns = time.perf_counter_ns()
        stream.put(text_response("late", final=True))
        await settle()  # the answer waits for the client
        await asyncio.sleep(0.01)
        exchange.reads.set()
        await exchange.rest()
        await exchange.ended()
    waited_ns = time.perf_counter_ns() - since_ns
    assert STALL_NS <= dict(receipt.parts())["stall"] <= waited_ns


# However sending ends, the stream is left.


async def test_a_disconnect_cancels_the_stream(stream: ResponseStream) -> None:
    async with streamed(stream, [text_response("one")]) as exchange:
        await exchange.start()
        assert await exchange.chunk() == says("one")
        assert not stream.cancelled
        exchange.leave()
        await exchange.ended()
    assert stream.cancelled
    assert tasks_left() == []


async def test_a_disconnect_during_a_write_cancels_the_stream(
    stream: ResponseStream,
) -> None:
    exchange = streamed(stream, [text_response("one")])
    exchange.reads.clear()
    async with exchange:
        await settle()
        exchange.leave()
        await exchange.ended()
    assert stream.cancelled
    assert tasks_left() == []


async def test_a_slow_client_holds_back_the_producer(stream: ResponseStream) -> None:
    exchange = streamed(stream, [text_response("zero")])
    async with exchange:
        await exchange.start()
        assert await exchange.chunk() == says("zero")
        exchange.reads.clear()
        stream.put(text_response("one"))
        await settle()  # its write is stuck
        for text in ("two", "three", "four"):
            assert not stream.full
            stream.put(text_response(text))
        assert stream.full
        producer = asyncio.create_task(stream.room())
        await settle()
        assert not producer.done()
        exchange.reads.set()
        await soon(producer)


async def test_a_stopping_server_cancels_the_stream(stream: ResponseStream) -> None:
    async with streamed(stream, [text_response("one")]) as exchange:
        await exchange.start()
        exchange.stop_server()
        await exchange.ended()
    assert stream.cancelled
    assert tasks_left() == []
