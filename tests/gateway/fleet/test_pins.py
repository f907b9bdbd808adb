"""Sequences and conversations that a router has open at replicas, in `GET /v2/fleet`."""

import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.admission.timed_request import exceeded
from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet import connection, placement
from gateway.messages import InferRequest, SequenceTag
from tests.builders import TEXT, soon, text_request
from tests.gateway.conversations.chats import CHAT, turn
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.routing import calls, routing
from tests.gateway.fleet.test_status import Fleet


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)
    async with listening() as first, listening() as second:
        for each in (first, second):
            each.offer(offered(TEXT), offered(CHAT))
        async with routing(tmp_path, first, second) as routed:
            router = routed.router
            await until(lambda: all(each.serves(("chat", 1)) for each in router.connections))
            yield Fleet(routed, first, second)


def sequence(number: int, *, start: bool = False, end: bool = False) -> InferRequest:
    """A request of a sequence with a telling id."""
    return replace(text_request(), sequence=SequenceTag(f"private {number}", start, end))


def chatting(number: int, **options: Any) -> InferRequest:
    """A turn of a conversation with a telling id."""
    return turn("private words", f"private {number}", **options)


async def placed(fleet: Fleet, request: InferRequest) -> FakeReplica:
    """The replica that answers a request."""
    with fleet.routed.dataplane.infer(request) as stream:
        (found,) = await calls(fleet.first, fleet.second)
        found.answer(found.calls.pop(), "hello")
        await soon(stream.only())
    return found


def pinned(row: dict[str, Any]) -> list[int]:
    """The open sequences and conversations of a replica, or of a model there."""
    return [row["open_sequences"], row["open_conversations"]]


def rows(fleet: Fleet) -> dict[int, dict[str, Any]]:
    """The replicas by their ports."""
    found = fleet.routed.router.describe()["replicas"]
    assert "private" not in repr(found)
    return {int(each["address"].rpartition(":")[2]): each for each in found}


async def test_sequences_and_conversations_are_counted_apart_by_replica_and_model(
    fleet: Fleet,
) -> None:
    expected = {each.port: [0, 0] for each in (fleet.first, fleet.second)}
    for number in range(8):
        for kind, request in enumerate((sequence, chatting)):
            found = await placed(fleet, request(number, start=True))
            assert await placed(fleet, request(number)) is found
            expected[found.port][kind] += 1
    assert sum(map(sum, expected.values())) == 16
    for port, row in rows(fleet).items():
        assert pinned(row) == expected[port]
        by_model = {each["name"]: pinned(each) for each in row["models"]}
        text, chat = expected[port]
        assert by_model == {"text": [text, 0], "chat": [0, chat]}


async def test_an_ended_sequence_counts_no_longer(fleet: Fleet) -> None:
    for request in (sequence, chatting):
        found = await placed(fleet, request(1, start=True))
        assert sum(pinned(rows(fleet)[found.port])) == 1
        await placed(fleet, request(1, end=True))
        assert pinned(rows(fleet)[found.port]) == [0, 0]


def test_ended_sequences_leave_no_counts() -> None:
    pins, pin = placement.PlacedSequences().open, Any
    for key in (("", 1), ("", 2)):
        pins.add(key, pin)  # type: ignore[arg-type]  # any pin
    pins.pop(("", 1))
    assert pins.counts == {pin: 1}
    pins.pop(("", 2))
    assert list(pins.counts) == []


def test_a_version_adopts_unknown_sequences_only() -> None:
    for moves in (False, True):
        own, other = placement.PlacedSequences(), placement.PlacedSequences()
        for pins, key, pin in ((own, 1, "own"), (other, 1, "first"), (other, 2, "second")):
            pins.open.add(key, pin)  # type: ignore[arg-type]  # any pin
            pins.copies.add(key, pin)  # type: ignore[arg-type]
        own.adopt(other, moves=moves)
        for adopted, left in ((own.open, other.open), (own.copies, other.copies)):
            assert adopted.by_key == {1: "own", 2: "second"}
            assert left.by_key == {1: "first"} | ({} if moves else {2: "second"})


async def test_a_conversation_whose_first_turn_is_refused_does_not_count(fleet: Fleet) -> None:
    for number in range(5):
        for known in (False, True):
            if known:
                await placed(fleet, chatting(number, start=True))
            with fleet.routed.dataplane.infer(chatting(number)) as stream:
                (found,) = await calls(fleet.first, fleet.second)
                found.fail(found.calls.pop(), RefusedError(Code.INVALID_ARG, "not open"))
                with pytest.raises(InferenceError, match="not open"):
                    await soon(stream.only())
            present = rows(fleet).values()
            expected = number + known
            assert [sum(each) for each in zip(*map(pinned, present), strict=True)] == [0, expected]


async def test_a_conversation_that_begins_while_a_turn_of_it_is_refused_counts(
    fleet: Fleet,
) -> None:
    with fleet.routed.dataplane.infer(chatting(1)) as unknown:
        (found,) = await calls(fleet.first, fleet.second)
        refused = found.calls.pop()
        assert await placed(fleet, chatting(1, start=True)) is found
        found.fail(refused, RefusedError(Code.INVALID_ARG, "not open"))
        with pytest.raises(InferenceError, match="not open"):
            await soon(unknown.only())
    assert pinned(rows(fleet)[found.port]) == [0, 1]


async def test_a_conversation_that_is_refused_after_a_loss_counts_at_no_replica(
    fleet: Fleet,
) -> None:
    with fleet.routed.dataplane.infer(chatting(1)) as stream:
        (first,) = await calls(fleet.first, fleet.second)
        (second,) = {fleet.first, fleet.second} - {first}
        first.links[-1].abort()
        await until(lambda: bool(second.calls))
        second.fail(second.calls.pop(), RefusedError(Code.INVALID_ARG, "not open"))
        with pytest.raises(InferenceError, match="not open"):
            await soon(stream.only())
    assert [pinned(row) for row in rows(fleet).values()] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("error", [InferenceError(Code.INTERNAL, "broken"), exceeded(3)])
async def test_a_conversation_whose_first_turn_fails_counts(
    fleet: Fleet, error: InferenceError
) -> None:
    with fleet.routed.dataplane.infer(chatting(1, start=True)) as stream:
        (found,) = await calls(fleet.first, fleet.second)
        found.fail(found.calls.pop(), error)
        with pytest.raises(InferenceError, match=re.escape(error.message)):
            await soon(stream.only())
    assert pinned(rows(fleet)[found.port]) == [0, 1]


async def offer(fleet: Fleet, stable: int) -> None:
    """Offer two versions, of which the higher one is a candidate or has been promoted."""
    for each in (fleet.first, fleet.second):
        offers = []
        for config, version in itertools.product((TEXT, CHAT), (1, 2)):
            weight = 50.0 if version > stable else None
            names = ("stable",) if version == stable else ()
            found = offered(config, version)
            offers.append(msgspec.structs.replace(found, names=names, weight=weight))
        each.offer(*offers)
    key, router = ("chat", stable), fleet.routed.router
    await until(
        lambda: all(key in each.models and each.models[key].names for each in router.connections)
    )
    for name in ("chat", "text"):
        assert fleet.routed.dataplane.labels(name)["stable"] == stable


async def test_a_conversation_that_another_version_continues_counts_once(fleet: Fleet) -> None:
    await offer(fleet, 1)
    found = await placed(fleet, chatting(1, start=True, version="1"))
    await offer(fleet, 2)
    row = rows(fleet)[found.port]
    assert pinned(row) == [0, 1]
    assert [pinned(each)[1] for each in row["models"]] == [0, 0, 0, 1]
    assert await placed(fleet, chatting(1, end=True)) is found
    assert pinned(rows(fleet)[found.port]) == [0, 0]


async def test_a_sequence_counts_at_both_versions_after_a_promotion(fleet: Fleet) -> None:
    await offer(fleet, 1)
    found = await placed(fleet, replace(sequence(1, start=True), version="1"))
    await offer(fleet, 2)
    row = rows(fleet)[found.port]
    assert [pinned(each)[0] for each in (row, *row["models"])] == [2, 1, 1, 0, 0]
    for version in ("", "1"):
        assert await placed(fleet, replace(sequence(1), version=version)) is found


async def test_sequences_of_another_process_at_an_address_do_not_count(fleet: Fleet) -> None:
    found = await placed(fleet, chatting(1, start=True))
    count = len(found.links)
    found.restart()
    await until(lambda: len(found.links) > count)
    await until(lambda: rows(fleet)[found.port]["state"] == "READY")
    assert pinned(rows(fleet)[found.port]) == [0, 0]


async def test_sequences_of_a_replica_that_is_not_connected_count_there(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await placed(fleet, chatting(1, start=True))
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 60)
    found.lose()
    await until(lambda: rows(fleet)[found.port]["state"] == "LOST")
    row = rows(fleet)[found.port]
    assert (pinned(row), row["models"]) == ([0, 1], [])


async def test_beyond_the_limit_the_oldest_sequences_count_no_longer(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MOST_SEQUENCES", 3)
    for number in range(5):
        await placed(fleet, chatting(number, start=True))
    present = rows(fleet).values()
    assert [sum(each) for each in zip(*map(pinned, present), strict=True)] == [0, 3]
