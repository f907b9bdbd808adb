"""Events and queues for httpunk."""

import asyncio

from gateway.frontends.grpc.hyper_call import HyperBackend, HyperEvent, HyperQueue
from tests.builders import soon


async def test_an_event_that_was_set_is_not_waited_for() -> None:
    signal = HyperEvent()
    signal.set()
    await soon(signal.wait())
    assert signal.is_set()


async def test_setting_an_event_wakes_its_waiter() -> None:
    signal = HyperEvent()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.set()
    await soon(waiting)


async def test_an_event_can_happen_again() -> None:
    signal = HyperEvent()
    signal.set()
    signal.clear()
    assert not signal.is_set()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.set()
    await soon(waiting)


async def test_a_cancelled_waiter_is_ignored() -> None:
    signal = HyperEvent()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    signal.set()
    await soon(signal.wait())


async def test_a_listener_is_called_when_the_event_is_set_or_immediately() -> None:
    told: list[str] = []
    signal = HyperEvent()
    signal.listen(lambda: told.append("then"))
    assert told == []
    signal.set()
    signal.set()
    assert told == ["then"]
    signal.listen(lambda: told.append("at once"))
    assert told == ["then", "at once"]


async def test_a_held_event_is_set_without_a_call() -> None:
    told: list[str] = []
    signal = HyperEvent()
    signal.listen(lambda: told.append("set"))
    signal.hold()
    signal.set()
    assert (signal.is_set(), told) == (True, [])
    signal.clear()
    signal.set()
    assert told == ["set"]


async def test_a_listener_can_be_removed() -> None:
    told: list[str] = []
    signal = HyperEvent()
    signal.listen(lambda: told.append("set"))
    signal.listen(None)
    signal.set()
    assert told == []


async def test_a_queue_keeps_the_order_of_its_items() -> None:
    mailbox = HyperQueue(asyncio.get_running_loop())
    mailbox.send(1)
    mailbox.send(None)
    assert [await soon(mailbox.receive()), await soon(mailbox.receive())] == [1, None]


async def test_a_queue_keeps_the_order_of_items_that_come_while_it_is_read() -> None:
    mailbox = HyperQueue(asyncio.get_running_loop())
    mailbox.send(1)
    mailbox.send(2)
    found = [await soon(mailbox.receive())]
    mailbox.send(3)
    found += [await soon(mailbox.receive()), await soon(mailbox.receive())]
    assert found == [1, 2, 3]


async def test_a_reader_of_an_empty_queue_gets_the_next_item() -> None:
    mailbox = HyperQueue(asyncio.get_running_loop())
    waiting = asyncio.create_task(mailbox.receive())
    await asyncio.sleep(0)
    mailbox.send("late")
    assert await soon(waiting) == "late"


async def test_the_backend_makes_events_and_both_ends_of_queues() -> None:
    backend = HyperBackend(asyncio.get_running_loop())
    assert isinstance(backend.event(), HyperEvent)
    sender, receiver = backend.queue()
    sender.send("item")
    assert await soon(receiver.receive()) == "item"
