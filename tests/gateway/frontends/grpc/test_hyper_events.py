"""What httpunk waits on."""

import asyncio

from gateway.frontends.grpc.hyper_events import HyperBackend, HyperEvent, HyperQueue
from tests.builders import soon


async def test_an_event_that_was_set_is_not_waited_for() -> None:
    signal = HyperEvent(asyncio.get_running_loop())
    signal.set()
    await soon(signal.wait())
    assert signal.is_set()


async def test_who_waits_for_an_event_is_woken() -> None:
    signal = HyperEvent(asyncio.get_running_loop())
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.set()
    await soon(waiting)


async def test_an_event_can_happen_again() -> None:
    signal = HyperEvent(asyncio.get_running_loop())
    signal.set()
    signal.clear()
    assert not signal.is_set()
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.set()
    await soon(waiting)


async def test_who_has_given_up_waiting_does_not_hurt() -> None:
    signal = HyperEvent(asyncio.get_running_loop())
    waiting = asyncio.create_task(signal.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    signal.set()
    await soon(signal.wait())


async def test_a_listener_is_told_when_it_happens_or_at_once() -> None:
    told: list[str] = []
    signal = HyperEvent(asyncio.get_running_loop())
    signal.listen(lambda: told.append("then"))
    assert told == []
    signal.set()
    signal.set()
    assert told == ["then"]
    signal.listen(lambda: told.append("at once"))
    assert told == ["then", "at once"]


async def test_what_is_put_into_a_mailbox_comes_out_in_order() -> None:
    mailbox = HyperQueue(asyncio.get_running_loop())
    mailbox.send(1)
    mailbox.send(None)
    assert [await soon(mailbox.receive()), await soon(mailbox.receive())] == [1, None]


async def test_who_waits_at_an_empty_mailbox_gets_what_comes() -> None:
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
