"""Requests of models with tokens at a router: what they carry, where they go, and their moves."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.fleet import moves
from gateway.fleet.choice import Load
from gateway.fleet.handshake import FleetKind
from gateway.fleet.keys import PIECE_BYTES, PrefixScope
from gateway.fleet.offers import first_load, write_load, write_prefixes
from gateway.fleet.prefixes import KeyChanges
from gateway.fleet.prompts import keys_of_fleet
from gateway.messages import InferRequest, RoutedPrompt, SequenceTag, Usage
from gateway.processes.channel import number
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import write_response
from gateway.stream import ResponseStream
from tests.builders import DECOUPLED, TEXT, soon, text_request, text_response
from tests.conftest import tasks_left
from tests.gateway.admission.deadline_planes import SECOND, whole
from tests.gateway.fleet.fake_replica import FakeReplica, offered, until
from tests.gateway.fleet.routing import NO_SUMS, Routed, routing, sums

KEY = ("text", 1)
LONG = "All happy families are alike. " * 100
LOAD = replace(first_load(offered(TEXT)), prefill_rate=1000.0, step_secs=0.01)
KEYS = keys_of_fleet("sluice", b"").of_text(PrefixScope(model="text", version="1"), LONG)
PYTHON = replace(TEXT, backend="python")


@pytest.fixture(autouse=True)
async def _no_task_is_left() -> AsyncIterator[None]:
    yield
    assert tasks_left() == []


async def asked(stream: ResponseStream, *replicas: FakeReplica) -> tuple[FakeReplica, int]:
    """The replica with a request, and the number of its call."""
    await until(lambda: any(each.calls for each in replicas))
    (found,) = [each for each in replicas if each.calls]
    return found, found.calls.pop()


async def place(
    routed: Routed, replicas: list[FakeReplica], request: InferRequest, tokens: int
) -> tuple[FakeReplica, InferRequest]:
    """The replica that gets a request and answers with that usage, and the request there."""
    with routed.dataplane.infer(request) as stream:
        found, call = await asked(stream, *replicas)
        found.answer(call, "hello", Usage(tokens, 1))
        await soon(stream.only())
    return found, found.requests[call]


def announce(replica: FakeReplica, load: Load, *gained: bytes) -> None:
    """Announce a load, and prefixes before it."""
    if gained:
        replica.send(FleetKind.PREFIXES, write_prefixes(KEY, KeyChanges(gained)))
    replica.send(FleetKind.LOAD, write_load(KEY, load))


def has(
    routed: Routed, replica: FakeReplica, replicas: tuple[FakeReplica, ...], load: Load
) -> bool:
    """Whether the router has that load of a replica."""
    return routed.router.connections[replicas.index(replica)].loads[KEY].load == load


async def test_requests_carry_their_prompts_once_a_response_had_usage(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    _, before = await place(routed, replicas, text_request(LONG), 0)
    assert before.prompt is None
    _, first = await place(routed, replicas, text_request(LONG), 750)
    assert first.prompt is None
    _, found = await place(routed, replicas, text_request(LONG), 750)
    assert found.prompt is not None
    assert found.prompt.size_bytes == len(LONG)
    assert len(found.prompt.keys) == len(LONG) // PIECE_BYTES
    _, short = await place(routed, replicas, text_request("short"), 2)
    assert short.prompt == RoutedPrompt(5)


async def test_the_rest_of_a_text_has_a_prompt_of_its_own(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    for each in replicas:
        config = replace(TEXT, backend="vllm", model_transaction_policy=DECOUPLED)
        each.offer(offered(config))
    async with routing(tmp_path, *replicas) as routed:
        await place(routed, replicas, text_request(), 1)
        request = text_request(LONG, parameters={"max_tokens": 9})
        with routed.dataplane.infer(request) as stream:
            first, call = await asked(stream, *replicas)
            assert first.requests[call].prompt == RoutedPrompt(len(LONG), KEYS)
            first.respond(call, text_response("b" * 512, tokens=1))
            await soon(stream.batch())
            first.lose()
            other, rest = await asked(stream, *replicas)
            prompt = other.requests[rest].prompt
            assert prompt is not None
            assert prompt.size_bytes == len(LONG) + 512
            assert (*prompt.keys[:-1],) == KEYS
            other.answer(rest, "c")
            await soon(stream.batch())


async def test_a_new_router_knows_from_prefixes_that_a_model_has_tokens(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    announce(replicas[1], LOAD, b"12345678")
    await until(lambda: has(routed, replicas[1], replicas, LOAD))
    _, found = await place(routed, replicas, text_request(LONG), 750)
    assert found.prompt is not None


async def test_a_request_goes_to_the_replica_with_its_prefix(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    await place(routed, replicas, text_request(), 1)
    for each in replicas:
        load = replace(LOAD, seen=max(each.requests, default=0))
        announce(each, load, *(KEYS if each is replicas[1] else ()))
        await until(lambda each=each, load=load: has(routed, each, replicas, load))
    for turn in range(6):
        request = text_request(LONG + f"Why? {turn}" * 100)
        assert (await place(routed, replicas, request, 1000))[0] is replicas[1]


async def test_a_request_leaves_its_prefix_for_a_replica_that_serves_it_sooner(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    await place(routed, replicas, text_request(), 1)
    for each in replicas:
        waiting = 5000 if each is replicas[1] else 0
        load = replace(LOAD, seen=max(each.requests, default=0), waiting_tokens=waiting)
        announce(each, load, *(KEYS if waiting else ()))
        await until(lambda each=each, load=load: has(routed, each, replicas, load))
    assert (await place(routed, replicas, text_request(LONG), 750))[0] is replicas[0]


async def test_a_prefix_counts_from_the_choice_on(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    await place(routed, replicas, text_request(), 1)
    for each in replicas:
        load = replace(LOAD, seen=max(each.requests, default=0))
        announce(each, load)
        await until(lambda each=each, load=load: has(routed, each, replicas, load))
    first, _ = await place(routed, replicas, text_request(LONG), 750)
    for _ in range(5):
        assert (await place(routed, replicas, text_request(LONG), 750))[0] is first


async def test_the_prefixes_of_a_lost_replica_are_forgotten(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    announce(replicas[1], LOAD, b"12345678")
    await until(lambda: has(routed, replicas[1], replicas, LOAD))
    replicas[1].links[-1].abort()
    await until(lambda: len(replicas[1].links) == 2)
    await until(lambda: routed.router.connections[1].serves(KEY))
    replicas[1].send(FleetKind.PREFIXES, write_prefixes(KEY, KeyChanges(lost=[b"12345678"])))
    await until(lambda: len(replicas[1].links) == 3)  # the key is foreign now


class TestMoves:
    """Both replicas are announced; the requests are long, and the turns short."""

    @pytest.fixture(autouse=True)
    def _short_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(moves, "TURN_SECS", 0.01)

    async def waiting(
        self, routed: Routed, replicas: list[FakeReplica], request: InferRequest
    ) -> tuple[ResponseStream, FakeReplica, int]:
        """A request with long work before it at its replica; the other one is idle then."""
        await place(routed, replicas, text_request(), 1)
        for each, tokens in zip(replicas, (60_000, 100_000), strict=True):
            load = replace(LOAD, seen=max(each.requests, default=0), waiting_tokens=tokens)
            announce(each, load)
            await until(lambda each=each, load=load: has(routed, each, replicas, load))
        stream = routed.dataplane.infer(request)
        found, call = await asked(stream, *replicas)
        assert found is replicas[0]
        return stream, found, call

    def relieve(self, routed: Routed, replicas: list[FakeReplica]) -> Load:
        load = replace(LOAD, seen=max(replicas[1].requests, default=0))
        announce(replicas[1], load)
        return load

    async def test_a_request_that_has_not_begun_moves_and_is_cancelled_where_it_was(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        stream, _, call = await self.waiting(routed, replicas, text_request(LONG))
        with stream:
            self.relieve(routed, replicas)
            moved, new = await asked(stream, replicas[1])
            await until(lambda: replicas[0].gone == [call])
            assert moved.requests[new].prompt is not None
            assert sums(routed) == {**NO_SUMS, "requests": 3, "moves": 1}
            replicas[0].answer(call, "late")
            moved.answer(new, "hello", Usage(750, 1))
            response = await soon(stream.only())
            assert response.outputs[0].elements() == (b"hello",)

    async def test_a_moved_request_has_the_time_that_is_left_of_its_deadline(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        due = time.perf_counter_ns() + 3600 * SECOND
        request = text_request(LONG, deadline=whole(due))
        stream, _, _ = await self.waiting(routed, replicas, request)
        with stream:
            await asyncio.sleep(0.3)
            self.relieve(routed, replicas)
            moved, new = await asked(stream, replicas[1])
            found = moved.requests[new].deadline
            assert found is not None
            assert found.held_whole_ns == found.whole_ns < due + SECOND // 4

    async def test_a_moved_request_whose_replica_is_lost_is_repeated_once(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        stream, _, _ = await self.waiting(routed, replicas, text_request(LONG))
        with stream:
            self.relieve(routed, replicas)
            await asked(stream, replicas[1])
            replicas[1].links[-1].abort()
            found, call = await asked(stream, *replicas)
            assert sums(routed) == {**NO_SUMS, "requests": 4, "moves": 1, "retries": 1}
            found.answer(call, "hello")
            await soon(stream.only())

    async def test_a_request_of_a_sequence_does_not_move(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        await place(routed, replicas, text_request(), 1)
        request = replace(text_request(LONG), sequence=SequenceTag(7, start=True))
        for each in replicas:
            load = replace(LOAD, seen=max(each.requests, default=0), waiting_tokens=60_000)
            announce(each, load)
            await until(lambda each=each, load=load: has(routed, each, replicas, load))
        with routed.dataplane.infer(request) as stream:
            found, call = await asked(stream, *replicas)
            (instance,) = routed.dataplane.model("text").instances
            assert len(instance.waiting) == 0  # type: ignore[attr-defined]
            found.answer(call, "hello")
            await soon(stream.only())

    async def test_a_request_that_may_have_had_effects_does_not_move(
        self, tmp_path: Path, replicas: list[FakeReplica]
    ) -> None:
        for each in replicas:
            each.offer(offered(PYTHON))
        async with routing(tmp_path, *replicas) as routed:
            stream, found, call = await self.waiting(routed, replicas, text_request(LONG))
            with stream:
                (instance,) = routed.dataplane.model("text").instances
                assert len(instance.waiting) == 0  # type: ignore[attr-defined]
                found.answer(call, "hello")
                await soon(stream.only())

    async def test_an_answered_request_does_not_move(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        stream, found, call = await self.waiting(routed, replicas, text_request(LONG))
        (instance,) = routed.dataplane.model("text").instances
        assert len(instance.waiting) == 1  # type: ignore[attr-defined]
        with stream:
            found.answer(call, "hello")
            await soon(stream.only())
        assert len(instance.waiting) == 0  # type: ignore[attr-defined]

    async def test_a_request_with_its_first_response_does_not_move(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        stream, found, call = await self.waiting(routed, replicas, text_request(LONG))
        (instance,) = routed.dataplane.model("text").instances
        with stream:
            found.links[-1].send(InferenceKind.DATA, call, write_response(text_response("a")))
            await soon(stream.batch())
            assert len(instance.waiting) == 0  # type: ignore[attr-defined]

    async def test_a_request_whose_large_response_arrives_does_not_move(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        stream, found, call = await self.waiting(routed, replicas, text_request(LONG))
        (instance,) = routed.dataplane.model("text").instances
        with stream:
            found.links[-1].send(FleetKind.LARGE_DATA, call, number(1))
            await until(lambda: len(instance.waiting) == 0)  # type: ignore[attr-defined]

    async def test_a_cancelled_request_does_not_move(
        self, routed: Routed, replicas: list[FakeReplica]
    ) -> None:
        stream, found, call = await self.waiting(routed, replicas, text_request(LONG))
        (instance,) = routed.dataplane.model("text").instances
        stream.close()
        assert len(instance.waiting) == 0  # type: ignore[attr-defined]
        await until(lambda: found.gone == [call])
