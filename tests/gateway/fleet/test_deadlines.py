"""Deadlines of requests at a router and at its replicas."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admission.timed_request import exceeded, unreachable
from gateway.config import ModelConfig
from gateway.errors import InferenceError, Refusal
from gateway.fleet.choice import ReplicaState
from gateway.frontends.http.app import build_app
from gateway.messages import Deadline, InferRequest
from gateway.settings import HttpSettings
from tests.builders import soon, text_request, text_response, texts
from tests.conformance.models import HOLD, identity
from tests.gateway.admission.deadline_planes import SECOND, first, values, whole
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.in_one_loop import pair
from tests.gateway.fleet.large_ends import Call, connecting, listening_port, numbers, request
from tests.gateway.fleet.losing import LLM, generation, lose_after, read, taken
from tests.gateway.fleet.routing import Routed, sums
from tests.serving import held, write_model

HOUR_NS = 3600 * SECOND
LATE_SECS = 0.3
HOLDING = identity("BYTES", "1", **HOLD)
HOLDING = HOLDING.replace("INPUT", "text_input").replace("OUTPUT", "text_output")
REFUSALS = [unreachable(2.5, 1.0, "its first response"), exceeded(0), exceeded(0, retries=False)]


@pytest.fixture
def hosted() -> ModelConfig:
    return LLM


def later(after_ns: int = HOUR_NS) -> int:
    return time.perf_counter_ns() + after_ns


def generation_by(deadline: Deadline) -> InferRequest:
    return replace(generation(), deadline=deadline)


def lateness_ns(found: Deadline | None, asked: Deadline) -> list[int]:
    """The times by which those of a deadline at a replica are later than those of its client.

    Both processes of these tests have one clock.
    """
    assert found is not None
    names = [each for each in Deadline.__dataclass_fields__ if each != "asked"]
    pairs = [(getattr(found, each), getattr(asked, each)) for each in names]
    assert [bool(there) for there, _ in pairs] == [bool(here) for _, here in pairs]
    assert found.asked is asked.asked
    return [there - here for there, here in pairs]


async def sent(routed: Routed, request: InferRequest, *replicas: FakeReplica) -> InferRequest:
    """A request as its replica gets it, which answers."""
    with routed.dataplane.infer(request) as stream:
        found, call = await taken(*replicas)
        found.answer(call, "hello")
        await soon(stream.only())
    return found.requests[call]


@pytest.mark.parametrize(
    "names",
    [
        ("first_ns", "held_first_ns"),
        ("whole_ns", "held_whole_ns"),
        ("first_ns",),
        ("whole_ns",),
        ("slo_first_ns", "slo_token_ns"),
    ],
    ids=["stream", "answer", "client", "rpc", "wishes"],
)
async def test_a_replica_gets_the_time_that_is_left_of_a_deadline(
    routed: Routed, replicas: list[FakeReplica], names: tuple[str, ...]
) -> None:
    times = {each: SECOND if "slo" in each else later() for each in names}
    deadline = Deadline(asked=True, **times)
    found = (await sent(routed, generation_by(deadline), *replicas)).deadline
    assert all(-2000 < each < 10 * SECOND for each in lateness_ns(found, deadline))


async def test_a_replica_gets_the_deadline_of_a_parameter(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    found = await sent(routed, generation(deadline_ms=3_600_000), *replicas)
    assert found.deadline is not None
    assert found.deadline.held_whole_ns == found.deadline.whole_ns > later(HOUR_NS // 2)
    assert found.parameters == {"max_tokens": 9}
    assert (await sent(routed, generation(), *replicas)).deadline is None


async def test_a_retry_has_the_time_that_is_left(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    deadline = whole(later())
    with routed.dataplane.infer(generation_by(deadline)) as stream:
        lost, _ = await taken(*replicas)
        await asyncio.sleep(LATE_SECS)
        lost.lose()
        other, call = await taken(*replicas)
        assert other is not lost
        most = LATE_SECS * SECOND / 2
        assert all(each < most for each in lateness_ns(other.requests[call].deadline, deadline))
        other.answer(call, "hello")
        await soon(stream.only())


async def test_the_rest_of_a_text_is_due_with_the_whole_answer(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    due = later()
    deadline = Deadline(due, due, due, due, SECOND, SECOND, asked=True)
    with routed.dataplane.infer(generation_by(deadline)) as stream:
        await lose_after(stream, "b", *replicas)
        other, call = await taken(*replicas)
        rest = replace(deadline, first_ns=0, held_first_ns=0, slo_first_ns=0)
        lateness_ns(other.requests[call].deadline, rest)
        other.respond(call, text_response("c", tokens=1, final=True))
        assert texts(await read(stream, 1)) == ["c"]


async def test_a_continued_text_ends_at_its_deadline_with_all_its_tokens(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    """The timer of the replica may be the first."""
    with routed.dataplane.infer(generation_by(whole(later()))) as stream:
        await lose_after(stream, "b", *replicas)
        other, call = await taken(*replicas)
        other.respond(call, text_response("c", tokens=1))
        await read(stream, 1)
        other.fail(call, exceeded(1))
        with pytest.raises(Refusal, match=r"^deadline exceeded after 3 tokens$"):
            await soon(stream.batch())


@pytest.mark.parametrize("state", [ReplicaState.READY, ReplicaState.DRAINING])
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_refusal_by_a_deadline_is_that_of_the_replica(
    routed: Routed, replicas: list[FakeReplica], refusal: Refusal, state: ReplicaState
) -> None:
    with routed.dataplane.infer(generation_by(first(later()))) as stream:
        found, call = await taken(*replicas)
        found.offer(*found.offers.models, state=state)
        found.fail(call, refusal)
        with pytest.raises(Refusal) as caught:
            await soon(stream.batch())
    assert vars(caught.value) == vars(refusal)
    assert values(routed.dataplane)["refused_total"] == 1
    assert not any(each.calls for each in replicas)
    assert sums(routed)["retries"] == 0


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_clients_read_a_refusal_of_a_replica_as_that_of_one_server(
    routed: Routed, replicas: list[FakeReplica], refusal: Refusal
) -> None:
    app = build_app(routed.dataplane, HttpSettings(), "triton")
    transport, body = httpx.ASGITransport(app), {"text_input": "x"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"x-request-timeout-ms": "60000"}
        posting = client.post("/v2/models/text/generate", json=body, headers=headers)
        answering = asyncio.create_task(soon(posting))
        found, call = await taken(*replicas)
        assert found.requests[call].deadline is not None
        found.fail(call, refusal)
        answer = await answering
    assert answer.json() == {"error": refusal.message}
    assert answer.headers["x-refused-reason"] == refusal.refusal_reason
    assert answer.headers["x-should-retry"] == str(refusal.advice.retries).lower()
    if refusal.advice.predicted_wait_secs is None:
        assert answer.status_code == 504
        return
    assert (answer.status_code, answer.headers["x-predicted-wait-ms"]) == (503, "2500")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A repository, and an empty one."""
    write_model(tmp_path / "models", "text", HOLDING)
    (tmp_path / "nothing").mkdir()
    return tmp_path / "models", tmp_path / "nothing"


async def refused(stream: Any) -> str:
    with pytest.raises(InferenceError) as caught:
        await soon(stream.only())
    return caught.value.message


async def test_a_replica_ends_requests_at_their_deadlines_itself(
    folders: tuple[Path, Path],
) -> None:
    """The router holds none here: it passes its admission by."""
    async with pair(*folders) as (router, replica):
        model = router.model("text")
        with held(folders[0], "text"):
            due = later(SECOND)
            running = model.submit(text_request("x", deadline=whole(due)))
            await until(lambda: replica.in_flight == 1)
            queued = model.submit(text_request("x", deadline=whole(due)))
            for each in (running, queued):
                assert await refused(each) == "deadline exceeded after 0 tokens"
            await until(lambda: replica.in_flight == 0)
            assert time.perf_counter_ns() > due
        assert values(replica)["refused_total"] == 2
        assert await refused(model.submit(text_request("x", deadline=whole(1)))) == (
            "deadline exceeded after 0 tokens"
        )
        assert values(replica)["refused_total"] == 3


async def test_a_replica_does_not_end_requests_at_limits_of_their_clients(
    folders: tuple[Path, Path],
) -> None:
    past = Deadline(first_ns=1, whole_ns=1, slo_first_ns=1, asked=True)
    async with pair(*folders) as (router, replica):
        stream = router.model("text").submit(text_request("x", deadline=past))
        assert texts([await soon(stream.only())]) == ["x"]
        found = values(replica)
    assert "refused_total" not in found
    assert (found["admitted_late_total"], found["slo_requests_total"]) == (1, 1)


async def test_both_ends_have_metrics_of_admission(folders: tuple[Path, Path]) -> None:
    async with pair(*folders) as planes:
        with planes[0].infer(text_request("x", deadline=whole(later()))) as stream:
            await soon(stream.only())
        for each in planes:
            assert values(each)["admitted_late_total"] == 0


async def test_the_deadline_of_a_large_request_counts_from_its_receipt() -> None:
    """Not from the end of its arrival: less than a microsecond of both is lost."""
    async with listening_port() as replica, connecting(replica.port.ports["fleet"]) as router:
        call = Call(router, request(numbers(), deadline=whole(later())))
        asked = await replica.request()
        assert asked.deadline is not None
        assert (asked.deadline.whole_ns - asked.received_ns) % 1000 == 0
        assert asked.received_ns < asked.deadline.whole_ns - HOUR_NS // 2
        call.call.leave()


async def test_a_router_refuses_a_deadline_that_has_passed(folders: tuple[Path, Path]) -> None:
    async with pair(*folders) as (router, replica):
        with pytest.raises(Refusal, match="deadline exceeded after 0 tokens"):
            router.infer(text_request("x", deadline=whole(1)))
        assert replica.admission is None
