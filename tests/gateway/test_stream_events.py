"""Events of a stream: its recorder, its backend, its listeners."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, response_of_text
from gateway.stream import ResponseStream
from tests.builders import FLAG, Notebook, read_all, settle, soon, text_response, texts

pytestmark = pytest.mark.both


BROKEN = InferenceError(Code.INTERNAL, "broken")


async def leave(stream: ResponseStream) -> None:
    stream.cancel()


# What the recorder hears.


async def test_the_recorder_records_each_response_and_the_first_read(
    stream: ResponseStream, notebook: Notebook
) -> None:
    stream.put(text_response("one"))
    await soon(stream.batch())
    stream.put(text_response("two", final=True))
    await soon(stream.batch())
    assert notebook.lines == ["responded", "taken", "responded", "ended: complete"]


async def test_a_stream_needs_no_recorder() -> None:
    stream = ResponseStream()
    stream.put(text_response("one", final=True))
    stream.put(text_response("two"))
    assert await soon(read_all(stream)) == ["one"]


async def test_held_responses_are_read_after_release(stream: ResponseStream) -> None:
    stream.hold()
    stream.put(text_response("one"))
    stream.put(text_response("two", final=True))
    reader = asyncio.create_task(read_all(stream))
    await settle()
    assert stream.done
    assert not reader.done()
    stream.release()
    assert await soon(reader) == ["one", "two"]


async def test_an_end_or_an_error_is_held_too(stream: ResponseStream) -> None:
    stream.hold()
    stream.fail(BROKEN)
    reader = asyncio.create_task(stream.batch())
    await settle()
    assert not reader.done()
    stream.release()
    with pytest.raises(InferenceError, match="broken"):
        await soon(reader)


async def test_a_held_stream_holds_its_producer_back_at_the_limit() -> None:
    stream = ResponseStream(limit=1)
    stream.hold()
    stream.put(text_response("one"))
    assert stream.full
    producer = asyncio.create_task(stream.room())
    await settle()
    assert not producer.done()
    stream.release()
    assert texts(await soon(stream.batch())) == ["one"]
    await soon(producer)


@pytest.mark.parametrize("leave", [ResponseStream.cancel, lambda stream: stream.abandon(BROKEN)])
async def test_a_disconnect_or_an_abandonment_releases_a_held_stream(
    stream: ResponseStream, leave: Callable[[ResponseStream], None]
) -> None:
    stream.hold()
    reader = asyncio.create_task(read_all(stream))
    await settle()
    leave(stream)
    assert await soon(asyncio.gather(reader, return_exceptions=True)) in ([[]], [BROKEN])


@pytest.mark.parametrize(
    "end",
    [
        lambda stream: stream.put(text_response("one", final=True)),
        lambda stream: stream.end(),
        lambda stream: stream.fail(BROKEN),
    ],
    ids=["response", "end", "error"],
)
def test_a_stream_that_has_ended_drops_its_callback(
    stream: ResponseStream, end: Callable[[ResponseStream], None]
) -> None:
    told: list[str] = []
    stream.on_cancel(lambda: told.append("producer"))
    stream.subscribe(lambda: told.append("backend"), may_stop=True)
    end(stream)
    stream.cancel()
    stream.abandon(BROKEN)
    assert told == []


def test_a_producer_that_may_stop_is_asked_and_the_stream_continues(stream: ResponseStream) -> None:
    asked: list[str] = []
    stream.on_cancel(lambda: asked.append("execution"))
    stream.subscribe(lambda: asked.append("stop"), may_stop=True)
    stream.stop()
    stream.stop()
    assert asked == ["execution", "stop"]
    assert (stream.stopping, stream.done, stream.cancelled) == (True, False, False)
    stream.put(text_response("last", final=True))
    stream.stop()
    stream.cancel()
    assert texts(stream.take() or []) == ["last"]
    assert asked == ["execution", "stop"]


@pytest.mark.parametrize("end", [ResponseStream.cancel, ResponseStream.interrupt])
def test_a_backend_is_notified_of_a_disconnect_after_the_scheduler(
    stream: ResponseStream, end: Callable[[ResponseStream], None]
) -> None:
    notified: list[str] = []
    stream.on_cancel(lambda: notified.append("scheduler"))
    stream.subscribe(lambda: notified.append("backend"))
    end(stream)
    stream.cancel()
    assert notified == ["scheduler", "backend"]


def test_a_backend_that_cannot_stop_is_not_asked_to(stream: ResponseStream) -> None:
    notified: list[str] = []
    stream.subscribe(lambda: notified.append("backend"))
    stream.stop()
    assert (notified, stream.stopping, stream.done) == ([], False, True)
    with pytest.raises(InferenceError, match="Request was cancelled"):
        stream.take()


def test_a_late_subscription_is_notified_at_once(stream: ResponseStream) -> None:
    notified: list[str] = []
    stream.subscribe(lambda: None, may_stop=True)
    stream.stop()
    stream.subscribe(lambda: notified.append("stop"), may_stop=True)
    assert notified == ["stop"]
    stream.cancel()
    assert notified == ["stop", "stop"]
    stream.subscribe(lambda: notified.append("disconnect"))
    assert notified == ["stop", "stop", "disconnect"]


def test_a_request_that_is_queued_again_has_no_subscription(stream: ResponseStream) -> None:
    notified: list[str] = []
    stream.subscribe(lambda: notified.append("backend"), may_stop=True)
    stream.on_cancel(lambda: notified.append("queue"))
    stream.stop()
    assert (notified, stream.done) == (["queue"], True)


@pytest.mark.parametrize("queued", [True, False])
def test_a_request_that_nothing_executes_yet_is_cancelled_at_once(
    stream: ResponseStream, queued: bool
) -> None:
    asked: list[str] = []
    if queued:
        stream.on_cancel(lambda: asked.append("leave the queue"))
    stream.stop()
    with pytest.raises(InferenceError) as caught:
        stream.take()
    assert caught.value.code is Code.CANCELLED
    assert asked == ["leave the queue"] * queued


async def test_the_error_of_the_only_response_is_raised(stream: ResponseStream) -> None:
    stream.put(InferResponse(error=BROKEN))
    stream.put(FLAG)
    with pytest.raises(InferenceError, match="broken"):
        await soon(stream.only())


async def test_a_response_with_an_error_is_a_response(stream: ResponseStream) -> None:
    stream.put(InferResponse(error=BROKEN))
    stream.put(text_response("one", final=True))
    first, second = await soon(stream.batch())
    assert (first.error, second.error) == (BROKEN, None)


async def test_a_response_without_a_reader_is_cancelled() -> None:
    stream = ResponseStream()
    reading = asyncio.create_task(stream.only())
    await settle()
    stream.cancel()
    with pytest.raises(InferenceError) as caught:
        await soon(reading)
    assert caught.value.code is Code.CANCELLED


@pytest.mark.parametrize(
    "happen",
    [
        lambda stream: stream.put(text_response("one")),
        lambda stream: stream.put(text_response("one", final=True)),
        lambda stream: stream.end(),
        lambda stream: stream.fail(BROKEN),
        lambda stream: stream.abandon(BROKEN),
    ],
    ids=["response", "final response", "end", "error", "abandoned"],
)
def test_a_listener_is_called_for_later_and_earlier_events(
    stream: ResponseStream, happen: Callable[[ResponseStream], None]
) -> None:
    told: list[str] = []
    stream.listen(lambda: told.append("later"))
    assert told == []
    happen(stream)
    assert set(told) == {"later"}
    stream.listen(lambda: told.append("at once"))
    assert told[-1] == "at once"


def test_unread_responses_are_taken_without_waiting(stream: ResponseStream) -> None:
    assert stream.take() is None
    stream.put(text_response("one"))
    stream.put(text_response("two"))
    assert texts(stream.take() or ()) == ["one", "two"]
    assert stream.take() is None
    stream.hold()
    stream.put(text_response("three"))
    assert stream.take() is None
    stream.release()
    stream.fail(BROKEN)
    assert texts(stream.take() or ()) == ["three"]
    with pytest.raises(InferenceError, match="broken"):
        stream.take()


# Texts that the reader writes at once.


class Wire:
    """Writes texts while it is ready."""

    def __init__(self) -> None:
        self.ready = True
        self.written: list[bytes] = []

    def write_texts(self, name: str, texts: Sequence[bytes]) -> bool:
        assert name == "OUT"
        if self.ready:
            self.written += texts
        return self.ready


def put_text(stream: ResponseStream, text: bytes) -> bool:
    return stream.put_texts("OUT", (text,), (1,))


def test_a_text_is_written_at_once_unless_others_are_unread(
    stream: ResponseStream, notebook: Notebook
) -> None:
    wire, calls = Wire(), list[str]()
    stream.listen(lambda: calls.append("unread"), wire.write_texts)
    assert not put_text(stream, b"one")
    wire.ready = False
    put_text(stream, b"two")
    wire.ready = True
    put_text(stream, b"three")
    assert (wire.written, calls) == ([b"one"], ["unread"] * 2)
    assert stream.take() == [response_of_text("OUT", each, 1) for each in (b"two", b"three")]
    put_text(stream, b"four")
    assert wire.written == [b"one", b"four"]
    lines = ["delivered one", "responded", "responded", "taken", "delivered four"]
    assert notebook.lines == lines


def test_no_text_is_written_while_a_stream_is_held_or_after_its_end(
    stream: ResponseStream, notebook: Notebook
) -> None:
    wire = Wire()
    stream.listen(lambda: None, wire.write_texts)
    stream.hold()
    put_text(stream, b"one")
    stream.release()
    stream.take()
    stream.cancel()
    put_text(stream, b"two")
    assert wire.written == []
    cancelled = "ended: Cancelled: Request was cancelled"
    assert notebook.lines == ["responded", "taken", cancelled, "wasted"]


def test_without_a_writer_texts_are_put(stream: ResponseStream) -> None:
    assert [put_text(stream, text) for text in (b"one", b"two", b"three")] == [False, False, True]
    assert not stream.has_room
    wire = Wire()
    stream.listen(lambda: None, wire.write_texts)
    stream.close()
    put_text(stream, b"late")
    assert wire.written == []
