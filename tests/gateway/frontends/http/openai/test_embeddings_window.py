"""Many requests of one client: number in flight, order, and end."""

import asyncio

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.openai.embeddings import BURST, RequestWindow
from gateway.messages import InferRequest
from gateway.stream import ResponseStream
from tests.builders import soon, text_request, text_response, texts


class Model:
    """Takes requests while it has room, and answers when the test says so."""

    def __init__(self, room: int = 100) -> None:
        self.streams: list[ResponseStream] = []
        self.refused = 0
        self._room = room

    def submit(self, request: InferRequest) -> ResponseStream:
        if self.open >= self._room:
            self.refused += 1
            raise InferenceError(Code.UNAVAILABLE, "no room")
        self.streams.append(ResponseStream())
        return self.streams[-1]

    @property
    def open(self) -> int:
        return sum(not each.done for each in self.streams)

    def answer(self, index: int) -> None:
        self.streams[index].put(text_response(str(index), final=True))


def window(model: Model, count: int, limit: int) -> RequestWindow:
    return RequestWindow(model.submit, [text_request()] * count, limit)


async def take_text(found: RequestWindow) -> str | None:
    response = await soon(found.take())
    return None if response is None else texts([response])[0]


async def test_answers_come_in_the_order_of_the_requests() -> None:
    model = Model()
    with window(model, 3, 3) as found:
        taking = asyncio.ensure_future(take_text(found))
        await asyncio.sleep(0)
        for index in (2, 1, 0):
            model.answer(index)
        assert await taking == "0"
        assert [await take_text(found) for _ in range(3)] == ["1", "2", None]


async def test_no_more_are_under_way_than_the_limit() -> None:
    model = Model()
    with window(model, 5, 2) as found:
        for index in range(5):
            taking = asyncio.ensure_future(take_text(found))
            await asyncio.sleep(0)
            assert model.open == min(2, 5 - index)
            model.answer(index)
            assert await taking == str(index)
        assert await take_text(found) is None


async def test_a_model_with_less_room_gets_as_many_as_it_takes() -> None:
    model = Model(room=2)
    with window(model, 6, 5) as found:
        for index in range(6):
            taking = asyncio.ensure_future(take_text(found))
            await asyncio.sleep(0)
            model.answer(index)
            assert await taking == str(index)
    assert model.refused == 1


async def test_a_model_without_any_room_refuses() -> None:
    with window(Model(room=0), 2, 2) as found, pytest.raises(InferenceError, match="no room"):
        await found.take()


async def test_any_other_refusal_is_raised_at_once() -> None:
    asked = 0

    def submit(request: InferRequest) -> ResponseStream:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise InferenceError(Code.INVALID_ARG, "not this one")
        return ResponseStream()

    requests = [text_request()] * 3
    with RequestWindow(submit, requests, 3) as found, pytest.raises(InferenceError, match="not th"):
        await found.take()


async def test_the_error_of_one_request_cancels_all() -> None:
    model = Model()
    with window(model, 3, 3) as found:
        taking = asyncio.ensure_future(found.take())
        await asyncio.sleep(0)
        model.streams[0].fail(InferenceError(Code.INTERNAL, "broken"))
        with pytest.raises(InferenceError, match="broken"):
            await soon(taking)
    assert [each.cancelled for each in model.streams] == [True] * 3
    assert model.open == 0


async def test_a_pending_take_raises_cancelled() -> None:
    model = Model()
    with window(model, 3, 2) as found:
        taking = asyncio.ensure_future(found.take())
        await asyncio.sleep(0)
        found.cancel()
        with pytest.raises(InferenceError) as caught:
            await soon(taking)
    assert caught.value.code is Code.CANCELLED
    assert len(model.streams) == 2


async def test_others_have_their_turn_while_many_are_submitted() -> None:
    model = Model()
    with window(model, 4 * BURST, 4 * BURST) as found:
        taking = asyncio.ensure_future(found.take())
        await asyncio.sleep(0)
        assert len(model.streams) == BURST
        found.cancel()
        with pytest.raises(InferenceError):
            await soon(taking)
    assert len(model.streams) == BURST


async def test_nothing_to_ask_is_nothing_to_take() -> None:
    with window(Model(), 0, 2) as found:
        assert await found.take() is None
