"""Recordings without a reader: grace period, expiry, errors."""

import asyncio
import gc
import weakref

import pytest

from gateway.errors import Code, InferenceError
from gateway.resumption.recordings import Recordings
from gateway.stream import Interrupted, ResponseStream
from tests.builders import FLAG, settle, soon, text_response, texts
from tests.gateway.resumption.conftest import Keep, Llm
from tests.gateway.resumption.recordings import MOMENT, back, one, rest, say

BROKEN = InferenceError(Code.INTERNAL, "broken")


async def test_the_grace_period_begins_when_the_last_reader_leaves(llm: Llm, keep: Keep) -> None:
    recordings = keep(grace_secs=MOMENT)
    with llm.ask(recordings, "attended") as attended:
        execution = await llm.begun()
        with back(recordings, attended.token, 0):
            """A reader comes and goes while another one stays."""
        with llm.ask(recordings, "left"):
            left = await llm.begun()
        await soon(left.stopped.wait())
        await settle()
        assert not execution.stopped.is_set()
    await soon(execution.stopped.wait())


async def test_a_reader_within_the_grace_period_keeps_the_stream_alive(
    llm: Llm, keep: Keep
) -> None:
    recordings = keep(grace_secs=MOMENT)
    with llm.ask(recordings, "kept") as reader:
        execution = await llm.begun()
    with back(recordings, reader.token, 0) as again:
        with llm.ask(recordings, "left"):
            left = await llm.begun()
        await soon(left.stopped.wait())
        await settle()
        execution.finish("end")
        assert await rest(again) == ["end"]


async def test_after_its_end_a_stream_stays_for_a_while_and_leaves_nothing(
    llm: Llm, keep: Keep
) -> None:
    recordings = keep(grace_secs=MOMENT)
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        execution.finish("end")
        (response,) = await soon(reader.batch())
    with back(recordings, reader.token, 0) as again:
        assert await rest(again) == ["end"]
    recording = weakref.ref(again.recording)
    del reader, again, execution
    llm.instance.executions.clear()
    for _ in range(1000):
        if recording() is None:
            break
        await asyncio.sleep(MOMENT)
        gc.collect()
    assert recording() is None
    found = recordings.reading()
    assert (found.recordings, found.byte_size, found.expired) == (0, 0, 0)
    assert texts([response]) == ["end"]


async def test_a_complete_answer_without_a_reader_is_wasted(llm: Llm, keep: Keep) -> None:
    recordings = keep(grace_secs=MOMENT)
    with llm.ask(recordings):
        execution = await llm.begun()
        execution.answer(text_response("all of it", final=True, tokens=7))
        execution.end()
        await soon(execution.stopped.wait())
    assert llm.model.statistics.wasted_tokens == 0
    with llm.ask(recordings, "later"):
        later = await llm.begun()
    await soon(later.stopped.wait())
    assert llm.model.statistics.wasted_tokens == 7
    assert recordings.reading().expired == 1


# Ends.


async def test_every_reader_gets_an_error_after_the_responses_before_it(
    llm: Llm, recordings: Recordings
) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        say(execution, "a")
        execution.answer(BROKEN)
        for position in (0, 1):
            with back(recordings, reader.token, position) as again:
                if position == 0:
                    assert await one(again) == "a"
                with pytest.raises(InferenceError, match="broken"):
                    await soon(again.batch())
        assert await one(reader) == "a"
        with pytest.raises(InferenceError, match="broken"):
            await soon(reader.batch())


async def test_a_final_flag_is_a_response_as_any_other(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        say(execution, "a")
        execution.answer(FLAG)
        assert await rest(reader) == ["a", ""]
        assert reader.position == 2


async def test_only_insists_on_one_response(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as single, llm.ask(recordings) as several:
        (await llm.begun()).finish("one")
        execution = await llm.begun()
        say(execution, "one")
        execution.finish("two")
        assert texts([await soon(single.only())]) == ["one"]
        with pytest.raises(InferenceError, match="expected a single response, got 2"):
            await soon(several.only())


async def test_readers_get_the_interruption_of_a_request(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as reader:
        execution = await llm.begun()
        say(execution, "a")
        assert await one(reader) == "a"
        stream: ResponseStream = reader.recording.stream
        assert stream.interrupt()
        (last,) = await soon(reader.batch())
        assert last.parameters == {"cancelled": True}
        with back(recordings, reader.token, 0) as again, pytest.raises(Interrupted) as caught:
            await soon(again.only())
        assert texts(caught.value.answers) == ["a"]
    await soon(execution.stopped.wait())
