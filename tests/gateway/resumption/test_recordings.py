"""All recordings: look-up by token and key, total size, drain."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.policy.caller import Caller
from gateway.resumption.reader import EventId
from gateway.resumption.recording import MAX_FOLLOWERS, Key, KeyReused, RecordedRequest
from gateway.resumption.recordings import BYTES_PER_CHARACTER, RECORDING_BYTES, Recordings
from gateway.settings import ResumptionSettings
from gateway.stream import ResponseStream
from tests.builders import settle, soon, text_request, text_response, texts
from tests.gateway.resumption.conftest import PLACE, Keep, Llm

KEY = Key.of("key", PLACE, [b"hello"])
LIMIT = 10_000
EACH = LIMIT + RECORDING_BYTES
UNKNOWN = "there is no such stream to continue here"


# Coming back by token.


@pytest.mark.parametrize("place", ["/v2/models/other/generate_stream", PLACE + "/"])
async def test_a_stream_is_found_only_where_it_was_asked_for(
    llm: Llm, recordings: Recordings, place: str
) -> None:
    with llm.ask(recordings) as reader:
        with pytest.raises(InferenceError, match=UNKNOWN) as caught:
            recordings.resume(EventId(reader.token, 0), place)
        assert caught.value.code is Code.NOT_FOUND


@pytest.mark.parametrize("event", [None, EventId("", 0), EventId("x" * 32, 0)])
async def test_unknown_streams_are_refused_with_one_text(
    llm: Llm, recordings: Recordings, event: EventId | None
) -> None:
    with llm.ask(recordings), pytest.raises(InferenceError, match=UNKNOWN):
        recordings.resume(event, PLACE)


async def test_tokens_cannot_be_guessed(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as one, llm.ask(recordings) as other:
        assert len(one.token) == len(other.token) == 32
        assert one.token != other.token
        for wrong in (one.token[:-1], one.token.swapcase(), one.token + "="):
            with pytest.raises(InferenceError, match=UNKNOWN):
                recordings.resume(EventId(wrong, 0), PLACE)


@pytest.mark.parametrize("key", [None, KEY], ids=["resumed", "joined"])
async def test_a_reader_ends_with_its_caller_and_the_others_continue(
    llm: Llm, recordings: Recordings, key: Key | None
) -> None:
    first, second = Caller(tenant="a", key_id="1"), Caller(tenant="a", key_id="2")
    with llm.ask(recordings, key=key, caller=first) as reader:
        execution = await llm.begun()
        if key is None:
            other = recordings.resume(EventId(reader.token, 0), PLACE, second)
        else:
            other = llm.ask(recordings, key=key, caller=second)
        with other:
            waiting = asyncio.create_task(other.batch())
            await settle()
            second.valid = False
            recordings.end_invalid()
            with pytest.raises(InferenceError, match="is no longer valid") as ended:
                await soon(waiting)
            assert ended.value.code is Code.CANCELLED
            execution.answer(text_response("more"))
            assert texts(await soon(reader.batch())) == ["more"]


async def test_a_recording_keeps_its_request_without_inputs(
    llm: Llm, recordings: Recordings
) -> None:
    request = text_request("hello", model=llm.model.name, id="a", parameters={"long": "x" * LIMIT})
    asked = RecordedRequest(PLACE, llm.model, request)
    with recordings.open(asked, lambda: llm.model.submit(request)) as reader:
        assert reader.recorded == RecordedRequest(
            PLACE, llm.model, InferRequest(model="llm", id="a")
        )
        assert (await llm.begun()).requests == (request,)


# Joining by key.


async def test_of_two_requests_with_one_key_one_runs(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings, key=KEY) as first, llm.ask(recordings, key=KEY) as second:
        execution = await llm.begun()
        execution.answer(text_response("a"))
        assert texts(await soon(first.batch())) == ["a"]
        with llm.ask(recordings, key=KEY) as third:
            execution.finish("b")
            for reader, expected in ((first, ["b"]), (second, ["a", "b"]), (third, ["a", "b"])):
                assert texts(await soon(reader.batch())) == expected
        assert [each.replayed for each in (first, second, third)] == [False, True, True]
        assert first.token == second.token == third.token
    with llm.ask(recordings, key=KEY) as late:
        assert texts(await soon(late.batch())) == ["a", "b"]
    assert llm.instance.asked == ["hello"]
    assert recordings.reading().joined == 3


async def test_a_key_is_for_one_request(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings, key=KEY):
        for other in (Key.of("key", PLACE, [b"bye"]), Key.of("key", "/", [b"hello"])):
            with pytest.raises(KeyReused):
                llm.ask(recordings, "bye", key=other)
        await llm.begun()
    assert llm.instance.asked == ["hello"]


async def test_requests_without_a_key_are_never_joined(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings) as first, llm.ask(recordings) as second:
        assert not first.replayed
        assert not second.replayed
        assert first.token != second.token


async def test_a_failed_request_can_be_retried(llm: Llm, recordings: Recordings) -> None:
    with llm.ask(recordings, key=KEY) as failed:
        execution = await llm.begun()
        execution.answer(InferenceError(Code.UNAVAILABLE, "the engine has died"))
        with pytest.raises(InferenceError, match="the engine has died"):
            await soon(failed.batch())
        with llm.ask(recordings, key=KEY) as again:
            assert not again.replayed
            (await llm.begun()).finish("well")
            assert texts(await soon(again.batch())) == ["well"]
    with llm.ask(recordings, key=KEY) as joined:
        assert texts(await soon(joined.batch())) == ["well"]


async def test_a_request_that_is_refused_leaves_nothing(llm: Llm, recordings: Recordings) -> None:
    def refuse() -> ResponseStream:
        raise InferenceError(Code.INVALID_ARG, "no such input")

    with pytest.raises(InferenceError, match="no such input"):
        recordings.open(RecordedRequest(PLACE, llm.model, text_request(), KEY), refuse)
    assert recordings.reading().recordings == 0
    with llm.ask(recordings, key=KEY) as reader:
        assert not reader.replayed


async def test_an_answer_that_has_lost_its_beginning_is_not_joined(llm: Llm, keep: Keep) -> None:
    recordings = keep(buffer_size=1)
    with llm.ask(recordings, key=KEY) as reader:
        execution = await llm.begun()
        execution.answer(text_response("a"))
        await soon(reader.batch())
        with pytest.raises(InferenceError, match=r"no longer kept.*--resumable-buffer-size") as e:
            llm.ask(recordings, key=KEY)
        assert e.value.code is Code.ALREADY_EXISTS
    assert recordings.reading().joined == 0


async def test_a_key_is_free_again_when_its_request_is_forgotten(llm: Llm, keep: Keep) -> None:
    recordings = keep(grace_secs=0.01)
    with llm.ask(recordings, key=KEY):
        execution = await llm.begun()
    await soon(execution.stopped.wait())
    other = Key.of("key", PLACE, [b"bye"])
    with llm.ask(recordings, "bye", key=other) as reader:
        assert not reader.replayed


# Room.


async def test_the_total_size_is_limited(llm: Llm, keep: Keep) -> None:
    recordings = keep(buffer_size=LIMIT, total_size=2 * EACH)
    with llm.ask(recordings), llm.ask(recordings, key=KEY):
        with pytest.raises(InferenceError, match=r"--resumable-total-size.*retry later") as caught:
            llm.ask(recordings)
        assert caught.value.code is Code.UNAVAILABLE
        with llm.ask(recordings, key=KEY) as joined:
            assert joined.replayed
    assert len(llm.instance.executions) <= 2


async def test_ended_recordings_are_evicted_oldest_first(llm: Llm, keep: Keep) -> None:
    recordings = keep(buffer_size=LIMIT, total_size=2 * EACH)
    ended = []
    for number in range(3):
        with llm.ask(recordings) as reader:
            execution = await llm.begun()
            execution.answer(text_response("x" * (LIMIT - 2000)))
            execution.finish(str(number))
            while not reader.finished:
                await soon(reader.batch())
        ended.append(reader.token)
    with pytest.raises(InferenceError, match=UNKNOWN):
        recordings.resume(EventId(ended[0], 2), PLACE)
    for token in ended[1:]:
        with recordings.resume(EventId(token, 1), PLACE) as again:
            assert await soon(again.batch())
    assert recordings.reading().expired == 0


async def test_a_recording_with_a_reader_is_not_evicted(llm: Llm, keep: Keep) -> None:
    recordings = keep(buffer_size=LIMIT, total_size=EACH + RECORDING_BYTES + 1000)
    with llm.ask(recordings) as reader:
        (await llm.begun()).finish("end")
        await settle()
        # What has ended takes what it has, and no more.
        with llm.ask(recordings), pytest.raises(InferenceError, match="--resumable-total-size"):
            llm.ask(recordings)
        assert texts(await soon(reader.batch())) == ["end"]


async def test_a_long_id_takes_its_room(llm: Llm, keep: Keep) -> None:
    with_id = EACH + BYTES_PER_CHARACTER * LIMIT
    recordings = keep(buffer_size=LIMIT, total_size=with_id + EACH - 1, grace_secs=0.01)
    request = text_request("hello", model=llm.model.name, id="x" * LIMIT)
    asked = RecordedRequest(PLACE, llm.model, request)
    for _ in range(2):
        with recordings.open(asked, lambda: llm.model.submit(request)):
            with pytest.raises(InferenceError, match="--resumable-total-size"):
                llm.ask(recordings)
            execution = await llm.begun()
        await soon(execution.stopped.wait())
    with llm.ask(recordings), llm.ask(recordings):
        pass


async def test_the_readers_of_one_stream_are_limited(llm: Llm, recordings: Recordings) -> None:
    with ExitStack() as readers:
        found = [readers.enter_context(llm.ask(recordings, key=KEY)) for _ in range(MAX_FOLLOWERS)]
        for one_more in (
            lambda: llm.ask(recordings, key=KEY),
            lambda: recordings.resume(EventId(found[0].token, 0), PLACE),
        ):
            with pytest.raises(InferenceError, match=f"{MAX_FOLLOWERS} clients follow") as caught:
                one_more()
            assert caught.value.code is Code.UNAVAILABLE
        reading = recordings.reading()
        assert (reading.joined, reading.resumed) == (MAX_FOLLOWERS - 1, 0)
        found[0].cancel()
        with recordings.resume(EventId(found[0].token, 0), PLACE) as again:
            (await llm.begun()).finish("end")
            assert texts(await soon(again.batch())) == ["end"]


async def test_a_dropped_recording_frees_its_bytes(llm: Llm, keep: Keep) -> None:
    recordings = keep(buffer_size=LIMIT, total_size=EACH, grace_secs=0.01)
    for _ in range(3):
        with llm.ask(recordings):
            execution = await llm.begun()
        await soon(execution.stopped.wait())


def test_a_total_that_has_no_room_for_one_stream_is_refused() -> None:
    Recordings(ResumptionSettings(buffer_size=LIMIT, total_size=EACH))
    with pytest.raises(InferenceError, match=f"--resumable-total-size is {EACH - 1}, .* {EACH}"):
        Recordings(ResumptionSettings(buffer_size=LIMIT, total_size=EACH - 1))


# The end.


async def test_a_drain_serves_readers_and_drops_the_other_recordings(llm: Llm, keep: Keep) -> None:
    recordings = keep()
    with llm.ask(recordings) as served:
        kept = await llm.begun()
        with llm.ask(recordings, key=KEY) as gone:
            left = await llm.begun()
        recordings.drain()
        await soon(left.stopped.wait())
        for refused in (
            lambda: recordings.resume(EventId(gone.token, 0), PLACE),
            lambda: recordings.resume(EventId(served.token, 0), PLACE),
            lambda: llm.ask(recordings),
        ):
            with pytest.raises(InferenceError, match="Server exiting") as caught:
                refused()
            assert caught.value.code is Code.UNAVAILABLE
        kept.answer(text_response("a"))
        assert texts(await soon(served.batch())) == ["a"]
        assert not kept.stopped.is_set()
    await soon(kept.stopped.wait())
    assert recordings.reading().recordings == 0
