"""The responses to one request: order, bounds, and disconnects."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.stream import SHARED_LIMIT_BYTES, ResponseStream
from tests.builders import FLAG, Notebook, read_all, soon, text_response, texts

pytestmark = pytest.mark.both


BROKEN = InferenceError(Code.INTERNAL, "broken")


async def test_responses_keep_their_order_and_end_with_the_final_one(
    stream: ResponseStream,
) -> None:
    stream.put(text_response("one"))
    stream.put(text_response("two"))
    stream.put(text_response("three", final=True))
    assert stream.done
    assert await soon(read_all(stream)) == ["one", "two", "three"]
    assert await soon(stream.batch()) == []


async def test_a_stream_may_end_without_a_final_response(stream: ResponseStream) -> None:
    stream.put(text_response("one"))
    stream.end()
    assert await soon(read_all(stream)) == ["one"]


async def test_a_batch_is_all_that_has_piled_up(stream: ResponseStream) -> None:
    stream.put(text_response("one"))
    stream.put(text_response("two"))
    assert texts(await soon(stream.batch())) == ["one", "two"]
    stream.put(text_response("three", final=True))
    assert texts(await soon(stream.batch())) == ["three"]


async def test_little_of_the_memory_of_another_process_may_wait_to_be_read(
    stream: ResponseStream,
) -> None:
    stream.put(InferResponse(shared_bytes=SHARED_LIMIT_BYTES - 1))
    assert not stream.full
    stream.put(InferResponse(shared_bytes=1))
    assert stream.full
    assert len(await soon(stream.batch())) == 2
    assert not stream.full


async def test_an_error_is_raised_after_the_responses_before_it(stream: ResponseStream) -> None:
    stream.put(text_response("one"))
    stream.fail(BROKEN)
    assert texts(await soon(stream.batch())) == ["one"]
    with pytest.raises(InferenceError, match="broken"):
        await soon(stream.batch())
    with pytest.raises(InferenceError, match="broken"):
        await soon(stream.batch())


@pytest.mark.parametrize(
    ("happen", "expected"),
    [
        (lambda stream: stream.put(text_response("one", final=True)), ["one"]),
        (lambda stream: stream.end(), []),
        (lambda stream: stream.fail(BROKEN), BROKEN),
        (lambda stream: stream.abandon(BROKEN), BROKEN),
        (lambda stream: stream.cancel(), []),
    ],
    ids=["response", "end", "error", "abandoned", "cancelled"],
)
async def test_a_waiting_reader_is_woken(
    stream: ResponseStream, happen: Callable[[ResponseStream], None], expected: object
) -> None:
    reader = asyncio.create_task(read_all(stream))
    await asyncio.sleep(0)  # the reader starts to wait
    happen(stream)
    outcome = await soon(asyncio.gather(reader, return_exceptions=True))
    assert outcome == [expected]


async def test_a_read_that_times_out_loses_no_response(stream: ResponseStream) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await stream.batch()
    stream.put(text_response("late", final=True))
    assert await soon(read_all(stream)) == ["late"]


# Leaving.


async def test_leaving_the_block_cancels_the_stream(
    stream: ResponseStream, notebook: Notebook
) -> None:
    told: list[str] = []
    stream.on_cancel(lambda: told.append("producer"))
    with stream:
        stream.put(text_response("one"))
        assert texts(await soon(stream.batch())) == ["one"]
    assert (stream.cancelled, stream.done, told) == (True, True, ["producer"])
    assert notebook.lines == ["responded", "taken", "ended: Cancelled: Request was cancelled"]


async def test_leaving_by_an_exception_cancels_and_lets_it_pass(stream: ResponseStream) -> None:
    told: list[str] = []
    stream.on_cancel(lambda: told.append("producer"))
    with pytest.raises(ZeroDivisionError), stream:
        raise ZeroDivisionError
    assert told == ["producer"]


async def test_leaving_after_the_end_has_no_effect(
    stream: ResponseStream, notebook: Notebook
) -> None:
    told: list[str] = []
    stream.on_cancel(lambda: told.append("producer"))
    with stream:
        stream.put(text_response("one", final=True))
        assert await soon(read_all(stream)) == ["one"]
    assert told == []
    assert notebook.lines == ["responded", "ended: complete", "taken"]


async def test_a_disconnect_after_the_error_is_not_a_second_end(
    stream: ResponseStream, notebook: Notebook
) -> None:
    with stream:
        stream.fail(BROKEN)
    assert notebook.lines == ["ended: Internal: broken"]


async def test_cancelling_twice_is_cancelling_once(
    stream: ResponseStream, notebook: Notebook
) -> None:
    told: list[str] = []
    stream.on_cancel(lambda: told.append("producer"))
    stream.cancel()
    stream.cancel()
    assert told == ["producer"]
    assert notebook.lines == ["ended: Cancelled: Request was cancelled"]


async def test_cancelling_before_the_first_read_is_safe(stream: ResponseStream) -> None:
    stream.cancel()
    assert await soon(stream.batch()) == []
    assert await soon(read_all(stream)) == []


async def test_on_cancel_is_called_immediately_after_a_disconnect(
    stream: ResponseStream,
) -> None:
    told: list[str] = []
    stream.cancel()
    stream.on_cancel(lambda: told.append("producer"))
    assert told == ["producer"]


async def test_responses_after_a_disconnect_are_wasted(
    stream: ResponseStream, notebook: Notebook
) -> None:
    stream.cancel()
    stream.put(text_response("one"))
    stream.put(text_response("two", final=True))
    assert notebook.lines[1:] == ["wasted", "wasted"]
    assert await soon(stream.batch()) == []


@pytest.mark.parametrize(
    "finish",
    [
        lambda stream: stream.put(text_response("one", final=True)),
        lambda stream: stream.end(),
        lambda stream: stream.fail(BROKEN),
        lambda stream: stream.abandon(BROKEN),
        lambda stream: stream.cancel(),
    ],
    ids=["final", "end", "error", "abandoned", "cancelled"],
)
async def test_a_stream_ends_once(
    stream: ResponseStream, notebook: Notebook, finish: Callable[[ResponseStream], None]
) -> None:
    finish(stream)
    ends = [line for line in notebook.lines if line.startswith("ended")]
    stream.end()
    stream.fail(InferenceError(Code.UNKNOWN, "later"))
    stream.abandon(InferenceError(Code.UNKNOWN, "later"))
    stream.cancel()
    assert [line for line in notebook.lines if line.startswith("ended")] == ends
    assert len(ends) == 1


async def test_abandoning_gives_the_reader_an_error_and_cancels_the_producer(
    stream: ResponseStream, notebook: Notebook
) -> None:
    told: list[str] = []
    stream.on_cancel(lambda: told.append("producer"))
    stream.put(text_response("one"))
    stream.abandon(BROKEN)
    assert told == ["producer"]
    assert texts(await soon(stream.batch())) == ["one"]
    with pytest.raises(InferenceError, match="broken"):
        await soon(stream.batch())
    assert notebook.lines.count("ended: Internal: broken") == 1


# Bounds.


async def test_a_stream_is_full_at_its_limit(stream: ResponseStream) -> None:
    stream.put(text_response("one"))
    stream.put(text_response("two"))
    assert not stream.full
    await soon(stream.room())
    stream.put(text_response("three"))
    assert stream.full


async def read(stream: ResponseStream) -> None:
    await stream.batch()


async def leave(stream: ResponseStream) -> None:
    stream.cancel()


async def abandon(stream: ResponseStream) -> None:
    stream.abandon(BROKEN)


@pytest.mark.parametrize("make_room", [read, leave, abandon])
async def test_a_producer_waits_for_room_until_a_read_or_a_disconnect(
    stream: ResponseStream, make_room: Callable[[ResponseStream], Awaitable[None]]
) -> None:
    for text in ("one", "two", "three"):
        stream.put(text_response(text))
    producer = asyncio.create_task(stream.room())
    for _ in range(3):
        await asyncio.sleep(0)  # every task that could wake the producer has run
    assert not producer.done()
    await soon(make_room(stream))
    await soon(producer)


# Exactly one.


@pytest.mark.parametrize(
    "responses",
    [[text_response("one", final=True)], [text_response("one")], [text_response("one"), FLAG]],
    ids=["final", "without the flag", "flag behind it"],
)
async def test_the_only_response_is_given(
    stream: ResponseStream, responses: list[InferResponse]
) -> None:
    for response in responses:
        stream.put(response)
    stream.end()
    assert texts([await soon(stream.only())]) == ["one"]


@pytest.mark.parametrize(
    ("responses", "count"),
    [
        ([], 0),
        ([FLAG], 0),
        ([text_response("one"), text_response("two", final=True)], 2),
        ([text_response("one"), text_response("two"), FLAG], 2),
    ],
)
async def test_any_other_number_than_one_is_an_internal_error(
    stream: ResponseStream, responses: list[InferResponse], count: int
) -> None:
    for response in responses:
        stream.put(response)
    stream.end()
    with pytest.raises(InferenceError) as caught:
        await soon(stream.only())
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == f"expected a single response, got {count}"


async def test_an_error_in_place_of_the_only_response_is_raised(stream: ResponseStream) -> None:
    stream.fail(BROKEN)
    with pytest.raises(InferenceError, match="broken"):
        await soon(stream.only())
