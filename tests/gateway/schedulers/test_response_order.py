"""Responses leave in the order in which their requests came."""

import asyncio

from gateway.schedulers.response_order import ResponseOrder
from gateway.stream import ResponseStream
from tests.builders import read_all, settle, soon, text_response


def arrived(order: ResponseOrder, count: int) -> list[ResponseStream]:
    streams = [ResponseStream() for _ in range(count)]
    for stream in streams:
        order.arrived(stream)
    return streams


def execute(order: ResponseOrder, *streams: ResponseStream) -> None:
    order.started(streams)
    for stream in streams:
        stream.put(text_response("answer", final=True))
    order.ended(streams)


async def readable(stream: ResponseStream) -> bool:
    reader = asyncio.create_task(stream.batch())
    await settle()
    if reader.done():
        return True
    reader.cancel()
    return False


async def test_a_response_waits_for_earlier_ones() -> None:
    order = ResponseOrder()
    first, second, third = arrived(order, 3)
    execute(order, third)
    execute(order, second)
    assert [await readable(each) for each in (second, third)] == [False, False]
    execute(order, first)
    for stream in (first, second, third):
        assert await soon(read_all(stream)) == ["answer"]


async def test_the_first_is_not_held_while_it_is_executed() -> None:
    order = ResponseOrder()
    first, second = arrived(order, 2)
    order.started([first, second])
    first.put(text_response("one of many"))
    second.put(text_response("one of many"))
    assert await readable(first)
    assert not await readable(second)
    order.ended([first, second])
    assert await readable(second)


async def test_responses_do_not_wait_for_a_request_that_left_the_queue() -> None:
    order = ResponseOrder()
    first, second, third = arrived(order, 3)
    execute(order, third)
    order.left(first)
    assert not await readable(third)
    order.left(second)
    assert await readable(third)
    order.left(second)


async def test_a_request_to_an_idle_model_is_not_held() -> None:
    order = ResponseOrder()
    (first,) = arrived(order, 1)
    execute(order, first)
    (second,) = arrived(order, 1)
    execute(order, second)
    assert await readable(second)


def test_executions_pause_when_too_many_answers_wait_for_one() -> None:
    order = ResponseOrder(limit=2)
    streams = arrived(order, 4)
    order.started(streams[:1])
    execute(order, streams[1])
    assert not order.blocked
    execute(order, streams[2])
    assert order.blocked
    order.ended(streams[:1])
    assert not order.blocked


def test_executions_do_not_pause_while_the_first_is_in_the_queue() -> None:
    order = ResponseOrder(limit=1)
    streams = arrived(order, 3)
    execute(order, streams[1])
    execute(order, streams[2])
    assert not order.blocked
    order.left(streams[0])
    assert not order.blocked
