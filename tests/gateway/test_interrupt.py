"""Stopping one request from outside: its reader stays, and gets an error."""

import pytest

from gateway.errors import Code, InferenceError
from gateway.stream import INTERRUPTED, Interrupted, ResponseStream
from tests.builders import FLAG, Notebook, read_all, settle, soon, text_response, texts

pytestmark = pytest.mark.both


async def test_the_reader_gets_what_was_produced_before_and_then_that_it_was_cancelled(
    stream: ResponseStream,
) -> None:
    stream.put(text_response("one"))
    stream.put(text_response("two"))
    assert stream.interrupt()
    stream.put(text_response("too late"))
    found = [response async for response in stream]
    assert texts(found) == ["one", "two", ""]
    assert found[-1] == INTERRUPTED
    assert found[-1].final
    assert found[-1].parameters == {"cancelled": True}


async def test_the_producer_stops_at_once(stream: ResponseStream) -> None:
    told: list[str] = []
    stream.on_cancel(lambda: told.append("stop"))
    stream.interrupt()
    assert (told, stream.done, stream.cancelled) == (["stop"], True, True)
    stream.cancel()
    assert told == ["stop"]


async def test_a_producer_that_begins_afterwards_is_stopped_at_once(stream: ResponseStream) -> None:
    told: list[str] = []
    stream.interrupt()
    stream.on_cancel(lambda: told.append("stop"))
    assert told == ["stop"]


async def test_it_counts_as_cancelled_once_and_what_comes_later_as_wasted(
    stream: ResponseStream, notebook: Notebook
) -> None:
    stream.put(text_response("one"))
    stream.interrupt()
    stream.put(text_response("too late"))
    stream.end()
    stream.cancel()
    assert notebook.lines == ["responded", "ended: Cancelled: Request was cancelled", "wasted"]


async def test_telling_the_reader_is_no_first_response_of_the_model(
    stream: ResponseStream, notebook: Notebook
) -> None:
    stream.interrupt()
    assert await soon(stream.batch()) == [INTERRUPTED]
    assert "taken" not in notebook.lines


async def test_the_first_response_is_still_one_if_it_is_read_later(
    stream: ResponseStream, notebook: Notebook
) -> None:
    stream.put(text_response("one"))
    stream.interrupt()
    assert len(await soon(stream.batch())) == 2
    assert notebook.lines[-1] == "taken"


@pytest.mark.parametrize("over", ["ended", "failed", "final", "left", "interrupted"])
async def test_what_is_over_cannot_be_interrupted(stream: ResponseStream, over: str) -> None:
    ways = {
        "ended": stream.end,
        "failed": lambda: stream.fail(InferenceError(Code.INTERNAL, "broken")),
        "final": lambda: stream.put(FLAG),
        "left": stream.cancel,
        "interrupted": stream.interrupt,
    }
    ways[over]()
    assert not stream.interrupt()


async def test_what_is_held_back_goes_out(stream: ResponseStream) -> None:
    stream.hold()
    stream.put(text_response("one"))
    assert stream.take() is None
    stream.interrupt()
    assert await soon(read_all(stream)) == ["one", ""]


async def test_a_producer_that_waits_for_room_continues(stream: ResponseStream) -> None:
    for text in ("one", "two", "three"):
        stream.put(text_response(text))
    stream.interrupt()
    await soon(stream.room())
    assert await soon(read_all(stream)) == ["one", "two", "three", ""]


async def test_a_listener_is_notified_of_the_interrupt(stream: ResponseStream) -> None:
    heard: list[object] = []
    stream.listen(lambda: heard.append(stream.take()))
    stream.interrupt()
    await settle()
    assert heard == [[INTERRUPTED]]


@pytest.mark.parametrize("produced", [[], ["one"]])
async def test_a_reader_of_exactly_one_response_gets_an_error_with_the_responses_so_far(
    stream: ResponseStream, produced: list[str]
) -> None:
    for text in produced:
        stream.put(text_response(text))
    stream.interrupt()
    with pytest.raises(Interrupted, match="Request was cancelled") as caught:
        await soon(stream.only())
    assert caught.value.code is Code.CANCELLED
    assert texts(caught.value.answers) == produced
