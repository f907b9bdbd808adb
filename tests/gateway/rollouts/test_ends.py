"""Streams and sequences at the end of a rollout, and candidates that die or do not answer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.messages import SequenceTag
from tests.builders import read_all, settle, soon, text_request
from tests.gateway.rollouts.servers import BROKEN, NumberedBackend, RolloutServer
from tests.registries import write

HALF: dict[str, Any] = {"steps": [{"weight": 50, "for": "10m"}, {"weight": 100, "for": "1h"}]}
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 3600000000 }"


@pytest.mark.parametrize(("end", "loser", "winner"), [("promote", "1", "2"), ("abort", "2", "1")])
async def test_a_stream_ends_where_it_began(
    server: RolloutServer, backend: NumberedBackend, end: str, loser: str, winner: str
) -> None:
    await server.publish(2, **HALF)
    backend.gates[loser] = asyncio.Event()
    server.rollouts.set_weight("m", 100 if loser == "2" else 0, "cli")
    with server.dataplane.infer(text_request(model="m")) as stream:
        await settle()
        getattr(server.rollouts, end)("m", "cli")
        await server.until_versions(winner)
        assert await server.asked(5) == {winner}
        backend.gates[loser].set()
        assert await soon(read_all(stream)) == [loser]


@pytest.mark.parametrize(("end", "loser", "winner"), [("promote", "1", "2"), ("abort", "2", "1")])
async def test_a_sequence_ends_where_it_began_before_its_version_is_unloaded(
    starting: Callable[[], Awaitable[RolloutServer]],
    tmp_path: Path,
    end: str,
    loser: str,
    winner: str,
) -> None:
    write(tmp_path / "models", "m", 1, more=SEQUENCES)
    server = await starting()
    write(tmp_path / "models", "m", 2, more=SEQUENCES)
    server.plan(**HALF)
    await soon(server.control.poll())
    server.rollouts.set_weight("m", 100 if loser == "2" else 0, "cli")
    assert await server.ask(sequence=SequenceTag(7, start=True)) == loser
    getattr(server.rollouts, end)("m", "cli")
    assert await server.ask(sequence=SequenceTag(7)) == loser
    assert await server.ask(sequence=SequenceTag(8, start=True)) == winner
    await soon(server.control.adjust(server.control.registry.named("m")[0].id))
    assert server.versions == ["1", "2"]
    assert await server.ask(sequence=SequenceTag(7, end=True)) == loser
    await server.until_versions(winner)
    assert await server.ask(sequence=SequenceTag(8, end=True)) == winner


async def test_a_candidate_that_dies_for_good_is_never_promoted(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    await server.publish(2, **HALF)
    assert await server.asked(40) == {"1", "2"}
    backend.refusals["2"] = BROKEN
    backend.instances["2"].die()
    await server.eventually(lambda: not server.model("2").instances.able)
    server.tick(1)
    assert await server.asked(300) == {"1"}
    server.tick(601)
    assert server.place == ("rolled_back", 0)
    await server.until_versions("1")
    assert await server.asked(5) == {"1"}


async def test_a_candidate_that_hangs_takes_no_more_than_it_may_have_in_flight(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    await server.publish(2, steps=[{"weight": 100, "for": "10m"}])
    backend.gates["2"] = asyncio.Event()
    server.model("2").most_in_flight = 3
    streams = [server.dataplane.infer(text_request(model="m")) for _ in range(10)]
    answers = [await soon(read_all(each)) for each in streams if each.model.version == "1"]
    assert answers == [["1"]] * 7
    assert server.place == ("rolled_back", 0)
    await server.until_versions("1")
    backend.gates["2"].set()
    assert [await soon(read_all(each)) for each in streams[:3]] == [["2"]] * 3


@pytest.mark.parametrize("end", ["promote", "abort"])
async def test_a_rollout_that_has_ended_does_not_end_again_at_the_next_start(
    starting: Callable[[], Awaitable[RolloutServer]], end: str
) -> None:
    first = await starting()
    await first.publish(2, **HALF)
    getattr(first.rollouts, end)("m", "cli")
    await first.until_versions("2" if end == "promote" else "1")
    history = first.rollouts.history("m")
    await first.stop()
    second = await starting()
    assert (second.versions, second.rollouts.history("m")) == (first.versions, history)
    assert not second.rollouts.decisions
