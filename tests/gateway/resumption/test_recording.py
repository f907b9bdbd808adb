"""Recordings: followers, limits, expiry."""

import asyncio

import pytest

from gateway.errors import Code, InferenceError
from gateway.resumption.reader import EventId
from gateway.resumption.recording import kept_bytes
from gateway.resumption.recordings import Recordings
from gateway.stream import DEFAULT_LIMIT
from tests.builders import settle, soon, text_response, texts
from tests.gateway.resumption.conftest import Keep, Llm
from tests.gateway.resumption.recordings import MOMENT, back, one, rest, say

ONE = kept_bytes(text_response("0"))


WORDS = [str(number) for number in range(6)]


async def test_a_reader_gets_all_responses(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        say(execution, *WORDS)
        execution.finish("end")
        assert await rest(reader) == [*WORDS, "end"]
        assert reader.finished
        assert await soon(reader.batch()) == []


@pytest.mark.parametrize("got", range(len(WORDS) + 1))
async def test_a_stream_is_resumed_anywhere_without_loss_or_repetition(
    llm: Llm, recordings: Recordings, got: int
) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        before = []
        for word in WORDS[:got]:
            say(execution, word)
            before.append(await one(reader))
    say(execution, *WORDS[got:])
    for position in range(got + 1):
        with back(recordings, reader.token, position) as again:
            assert again.position == position
            if position < len(WORDS):
                found = texts(await soon(again.batch()))
                assert found == WORDS[position : position + len(found)]
    with back(recordings, reader.token, got) as again:
        execution.finish("end")
        assert before + await rest(again) == [*WORDS, "end"]
    for position in range(len(WORDS) + 1):
        with back(recordings, reader.token, position) as late:
            assert await rest(late) == [*WORDS, "end"][position:]


async def test_responses_are_numbered_from_one(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        execution.finish("a")
        ((event, response),) = reader.numbered(await soon(reader.batch()))
        assert (event, texts([response])) == (EventId(reader.token, 1), ["a"])
        assert reader.begins_with(event)
    with back(recordings, reader.token, 1) as again:
        assert not again.begins_with(event)


async def test_several_readers_follow_at_their_own_pace(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as first, back(recordings, first.token, 0) as second:
        execution = await llm.begun()
        say(execution, "a")
        assert await one(first) == "a"
        say(execution, "b")
        assert await one(first) == "b"
        execution.finish("c")
        assert await rest(first) == ["c"]
        assert await rest(second) == ["a", "b", "c"]


async def test_a_position_that_has_not_been_reached_is_refused(
    llm: Llm, recordings: Recordings
) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        execution.finish("a")
        await rest(reader)
        with pytest.raises(InferenceError, match=r"response 2 .* newest is 1") as caught:
            back(recordings, reader.token, 2)
        assert caught.value.code is Code.INVALID_ARG


# Bounds.


async def test_without_a_reader_a_full_buffer_blocks_the_model(llm: Llm, keep: Keep) -> None:
    recordings = keep(buffer_size=10 * ONE)
    words = [str(number % 10) for number in range(300)]
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
    say(execution, *words)
    execution.finish("end")
    await settle()
    held = execution.taken
    assert 10 < held <= 11 + DEFAULT_LIMIT + 1
    assert recordings.reading().byte_size == 11 * ONE
    await settle()
    assert execution.taken == held
    with back(recordings, reader.token, 0) as again:
        assert await rest(again) == [*words, "end"]
    assert recordings.reading().byte_size <= 10 * ONE


async def test_the_slowest_reader_holds_the_model_back(llm: Llm, keep: Keep) -> None:
    recordings = keep(buffer_size=10 * ONE)
    words = [str(number % 10) for number in range(300)]
    with llm.ask(recordings) as slow, back(recordings, slow.token, 0) as fast:
        execution = await llm.begun()
        say(execution, *words)
        await settle()
        assert texts(await soon(fast.batch())) == words[:11]
        await settle()
        assert execution.taken < 200
        assert recordings.reading().byte_size == 11 * ONE
        slow.cancel()
        found = words[:11]
        execution.finish("end")
        assert found + await rest(fast) == [*words, "end"]


async def test_responses_that_all_readers_have_are_dropped_beyond_the_limit(
    llm: Llm, keep: Keep
) -> None:
    recordings = keep(buffer_size=3 * ONE)
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        for word in WORDS:
            say(execution, word)
            assert await one(reader) == word
        assert recordings.reading().byte_size == 3 * ONE
        with pytest.raises(InferenceError, match=r"response 3 .* oldest is 4.*--resumable-b") as e:
            back(recordings, reader.token, 2)
        assert e.value.code is Code.NOT_FOUND
        with back(recordings, reader.token, 3) as again:
            execution.finish("end")
            assert await rest(again) == [*WORDS[3:], "end"]
        assert await rest(reader) == ["end"]


async def test_a_limit_is_kept_to_the_byte(llm: Llm, keep: Keep) -> None:
    exact, less = keep(buffer_size=2 * ONE), keep(buffer_size=2 * ONE - 1)
    for recordings, kept in ((exact, 2), (less, 1)):
        with llm.ask(recordings) as reader:
            execution = await llm.begun()
            say(execution, "a")
            await one(reader)
            execution.finish("b")
            await rest(reader)
        assert recordings.reading().byte_size == kept * ONE


async def test_a_response_beyond_the_limit_reaches_its_reader_and_is_not_kept(
    llm: Llm, keep: Keep
) -> None:
    recordings = keep(buffer_size=2 * ONE)
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        say(execution, "x" * 2 * ONE)
        assert len(await one(reader)) == 2 * ONE
        assert recordings.reading().byte_size == 0
        with pytest.raises(InferenceError, match=r"response 1 .* no longer kept"):
            back(recordings, reader.token, 0)
        execution.finish("end")
        assert await rest(reader) == ["end"]


async def test_a_response_beyond_the_limit_is_not_kept_without_a_reader(
    llm: Llm, keep: Keep
) -> None:
    recordings = keep(buffer_size=2 * ONE)
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
    say(execution, "a", "x" * 2 * ONE)
    execution.finish("b")
    await settle()
    assert recordings.reading().byte_size == ONE
    with back(recordings, reader.token, 2) as again:
        assert await rest(again) == ["b"]


# Leaving and coming back.


async def test_a_reader_that_is_cancelled_while_it_waits_gets_the_error(
    llm: Llm, recordings: Recordings
) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        waiting = asyncio.create_task(reader.batch())
        await settle()
        reader.cancel()
        reader.cancel()
        with pytest.raises(InferenceError) as caught:
            await soon(waiting)
        assert caught.value.code is Code.CANCELLED
    assert not execution.stopped.is_set()
    execution.finish("end")
    with back(recordings, reader.token, 0) as again:
        assert await rest(again) == ["end"]


async def test_an_expired_recording_stops_the_model_and_counts_its_tokens(
    llm: Llm, keep: Keep
) -> None:
    recordings = keep(grace_secs=MOMENT)
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        execution.answer(text_response("read", tokens=1))
        await one(reader)
        execution.answer(text_response("in vain", tokens=2))
        execution.answer(text_response("in vain, too", tokens=3))
        await settle()
    await soon(execution.stopped.wait())
    assert len(llm.model.requests) == 0
    assert llm.model.statistics.wasted_tokens == 5
    assert llm.model.statistics.completion_tokens == 6
    found = recordings.reading()
    assert (found.recordings, found.byte_size, found.expired) == (0, 0, 1)
    with pytest.raises(InferenceError, match="it has expired"):
        back(recordings, reader.token, 1)


async def test_tokens_that_are_dropped_unread_are_wasted_once(llm: Llm, keep: Keep) -> None:
    recordings = keep(grace_secs=MOMENT, buffer_size=ONE)
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        execution.answer(text_response("read", tokens=1))
        await one(reader)
    execution.answer(text_response("too large for nobody" * ONE, tokens=2))
    await settle()
    execution.answer(text_response("in vain", tokens=4))
    await soon(execution.stopped.wait())
    await settle()
    assert llm.model.statistics.wasted_tokens == 6


async def test_tokens_in_the_stream_are_wasted_too(llm: Llm, keep: Keep) -> None:
    recordings = keep(grace_secs=MOMENT, buffer_size=ONE)
    with llm.ask(recordings):
        execution = await llm.begun()
        for _ in range(10):
            execution.answer(text_response("x", tokens=1))
        await settle()
    await soon(execution.stopped.wait())
    assert llm.model.statistics.wasted_tokens == 10
