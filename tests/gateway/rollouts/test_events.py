"""Events of rollouts: their kinds, and readers that reconnect or are too slow."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.rollouts.events import MOST_EVENTS, RolloutEvent, RolloutEventKind
from tests.builders import soon
from tests.gateway.rollouts.servers import RolloutServer

HALF = [{"weight": 50, "for": "10m", "min_requests": 0}, {"weight": 100, "for": "1h"}]


async def until(events: AsyncGenerator[RolloutEvent], kind: str) -> RolloutEvent:
    """The next event of a kind."""
    while True:
        event = await soon(anext(events))
        if event.kind == kind:
            return event


async def test_a_reader_gets_the_whole_state_and_then_changes(server: RolloutServer) -> None:
    async with aclosing(server.rollouts.events.read()) as events:
        first = await soon(anext(events))
        assert first.kind is RolloutEventKind.RESET
        (version,) = first.data["versions"]
        assert (version["version"], version["state"], first.data["rollouts"]) == ("1", "READY", [])
        await server.publish(2, steps=HALF)
        step = await until(events, "step")
        assert (step.data["weight"], step.data["candidate"]) == (50, 2)
        live = await until(events, "live")
        assert (live.data["version"], live.data["state"]) == ("2", "READY")
        server.rollouts.pause("m", "cli")
        assert (await until(events, "state")).data["state"] == "paused"


async def test_a_reader_that_reconnects_gets_what_it_has_missed(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF)
    async with aclosing(server.rollouts.events.read()) as events:
        first = await soon(anext(events))
    server.rollouts.pause("m", "cli")
    server.rollouts.resume("m", "cli")
    async with aclosing(server.rollouts.events.read(first.id)) as events:
        assert (await soon(anext(events))).data["state"] == "paused"
        assert (await soon(anext(events))).data["state"] == "step"
    for unknown in ("", "x", "0-1", f"{first.id}0"):
        async with aclosing(server.rollouts.events.read(unknown)) as events:
            assert (await soon(anext(events))).kind is RolloutEventKind.RESET


async def test_a_reader_that_is_too_slow_is_dropped(server: RolloutServer) -> None:
    source = server.rollouts.events
    async with aclosing(source.read()) as events:
        await soon(anext(events))
        for _ in range(MOST_EVENTS + 1):
            source.publish(RolloutEventKind.STATE, {})
        assert await soon(anext(events, None)) is None
    assert source.readers == 0


async def test_evidence_comes_at_most_once_a_second(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF, guardrails={"errors": {}})
    async with aclosing(server.rollouts.events.read()) as events:
        await soon(anext(events))
        server.tick(1)
        evidence = await soon(anext(events))
        server.tick(0.5)
        server.rollouts.pause("m", "cli")
        assert (await soon(anext(events))).kind == "state"
        server.rollouts.resume("m", "cli")
        assert (await soon(anext(events))).kind == "step"
        server.tick(0.5)
        assert (await soon(anext(events))).kind == "evidence"
    assert [each["guardrail"] for each in evidence.data["guardrails"]] == ["errors"]
    assert (evidence.kind, evidence.id) == ("evidence", "")


async def test_a_broken_guardrail_is_an_event(server: RolloutServer) -> None:
    await server.publish(2, steps=HALF, guardrails={"errors": {}})
    async with aclosing(server.rollouts.events.read()) as events:
        await soon(anext(events))
        (of_model,) = server.rollouts.models()
        assert of_model.open is not None
        of_model.open.breach("errors", "9 of 9")
        of_model.changed()
        breach = await until(events, "breach")
        assert (breach.data["by"], breach.data["reason"]) == ("guardrail:errors", "9 of 9")
        assert (await until(events, "state")).data["state"] == "rolled_back"


async def test_streams_of_events_end_with_the_server(server: RolloutServer) -> None:
    async with aclosing(server.rollouts.events.read()) as events:
        await soon(anext(events))
        server.dataplane.refuse_requests()
        assert await soon(anext(events, None)) is None
