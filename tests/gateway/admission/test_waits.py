"""Refusals by predicted waits, and their counters, over a data plane with a model of one place."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.admission.admission import Admission
from gateway.config.scheduling import DynamicBatching
from gateway.dataplane import DataPlane
from gateway.errors import Refusal, RefusalReason
from gateway.messages import Deadline
from gateway.observability.access_log import AccessLog
from gateway.observability.request_record import Record
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules, Tenants
from gateway.stream import ResponseStream
from tests.builders import (
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
)
from tests.conftest import Serve
from tests.gateway.admission.deadline_planes import SECOND, first, plane, tokens, values, whole
from tests.gateway.admission.twin_planes import NUMBERS, answer_of, request


class Clock:
    """The time of requests with deadlines, in the place of the module `time`."""

    def __init__(self) -> None:
        self.ns = SECOND

    def perf_counter_ns(self) -> int:
        return self.ns

    def after(self, secs: float) -> int:
        """The time in some seconds."""
        return self.ns + int(secs * SECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("gateway.admission.timed_request.time", found)
    return found


class Trained:
    """A model with room for one request that has served twenty, each for a second."""

    def __init__(self, dataplane: DataPlane, instance: ScriptedInstance, clock: Clock) -> None:
        self.dataplane, self.instance, self.clock = dataplane, instance, clock
        self.streams: list[Any] = []

    async def train(self, requests: int) -> None:
        self.ask(deadline=first(self.clock.after(1e6)))
        for _ in range(requests):
            self.ask()
            await self.serve_one()

    def ask(self, **fields: Any) -> Any:
        self.streams.append(self.dataplane.infer(text_request(**fields)))
        return self.streams[-1]

    async def serve_one(self, secs: float = 1.0, count: int = 1) -> None:
        """Answer the oldest request, with that many tokens, after some time."""
        execution, stream = await self.instance.begun(), self.streams.pop(0)
        self.clock.ns = self.clock.after(secs / 2)
        if count > 1:
            execution.answer(tokens(1))
            await soon(stream.batch())
        self.clock.ns = self.clock.after(secs / 2)
        execution.answer(tokens(max(1, count - 1), final=True))
        execution.end()
        await soon(read_all(stream))

    def close(self) -> None:
        for each in self.streams:
            each.close()

    def refused(self, **fields: Any) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.ask(**fields)
        assert caught.value.refusal_reason is RefusalReason.DEADLINE_UNREACHABLE
        return caught.value


def nothing(*_: object) -> None:
    """The refusal of a queue that has room."""


Train = Callable[..., Awaitable[Trained]]


@pytest.fixture
async def train(serve: Serve, clock: Clock) -> AsyncIterator[Train]:
    """Makes a trained model with these settings."""
    made: list[Trained] = []

    async def train(
        requests: int = 20,
        tenants: Tenants | None = None,
        is_fair: bool = False,
        **settings: Any,
    ) -> Trained:
        instance = ScriptedInstance(concurrency=1)
        model = serve(instance)
        if is_fair:
            model.fair = SimpleNamespace(
                tenants=Tenants({"quiet": TenantRules()}),
                slack=1,
                refusal=nothing,
                counted=lambda _, ended: ended,
            )
        dataplane = plane(model, **settings)
        if tenants is not None:
            dataplane.admission = Admission(tenants)
        made.append(Trained(dataplane, instance, clock))
        await made[-1].train(requests)
        return made[-1]

    yield train
    for each in made:
        each.close()


async def test_a_request_that_would_be_late_is_refused_with_its_wait(train: Train) -> None:
    trained = await train()
    for _ in range(4):
        trained.ask()
    refusal = trained.refused(deadline=first(trained.clock.after(2)))
    wait = refusal.advice.predicted_wait_secs
    assert wait is not None
    assert 4.0 < wait < 8.0
    assert wait - 2 <= refusal.advice.retry_after_secs <= (wait - 2) * 1.5
    assert f"its first response is expected in {wait * 1e3:.0f} ms" in refusal.message
    assert "its deadline is in 2000 ms" in refusal.message
    trained.ask(deadline=first(trained.clock.after(wait / 0.9 + 1)))
    trained.ask(deadline=None)
    assert values(trained.dataplane)["refused_total"] == 1


async def test_the_line_of_a_request_has_its_deadline_and_its_predicted_wait(
    train: Train, tmp_path: Path
) -> None:
    trained, log = await train(), AccessLog(tmp_path / "log")
    trained.dataplane.access_log = log
    log.open()
    for _ in range(4):
        trained.ask()
    requests = [log.request("http", "/v2", "POST", "", []) for _ in range(3)]
    with requests[0] as request:
        request.began_ns = trained.clock.ns
        refusal = trained.refused(id="late", deadline=first(trained.clock.after(2)))
        request.note(refusal)
    with requests[1] as request:
        request.began_ns = trained.clock.ns
        trained.ask(deadline=whole(trained.clock.after(100)))
    with requests[2] as request:
        request.began_ns = trained.clock.ns
        with pytest.raises(Refusal) as caught:
            trained.ask(deadline=first(trained.clock.after(-1)))
        request.note(caught.value)
    log.close()
    late, admitted, over = map(json.loads, (tmp_path / "log").read_text().splitlines())
    wait = refusal.advice.predicted_wait_secs
    assert wait is not None
    assert late["reason"] == "deadline_unreachable"
    assert (late["model"], late["request_id"]) == ("text", "late")
    assert late["first_deadline_ms"] == 2000
    assert "deadline_ms" not in late
    assert late["predicted_wait_ms"] == round(wait * 1000, 3)
    assert admitted["deadline_ms"] == 100_000
    assert admitted["predicted_wait_ms"] == late["predicted_wait_ms"]
    assert "reason" not in admitted
    assert (over["reason"], over["first_deadline_ms"]) == ("deadline_exceeded", -1000)


async def test_nothing_is_refused_while_little_is_known(train: Train) -> None:
    trained = await train(requests=5)
    for _ in range(5):
        trained.ask(deadline=first(trained.clock.after(0.1)))
    assert values(trained.dataplane)["admission_wait_ratio_count"] == 0


async def test_one_refusal_of_some_is_admitted_and_counted_if_it_was_in_vain(train: Train) -> None:
    trained = await train(probe=2)
    late = first(trained.clock.after(1))
    trained.refused(deadline=late)
    probe = trained.ask(deadline=late)
    trained.refused(deadline=late)
    before = values(trained.dataplane)
    assert before["admission_probes_total"] == 1
    await trained.serve_one(0.1)
    assert not probe.done
    await trained.serve_one(0.1)
    counts = values(trained.dataplane)
    assert counts["refused_in_vain_total"] == 1
    assert counts["admitted_late_total"] == before["admitted_late_total"]
    assert counts["admission_wait_ratio_count"] == before["admission_wait_ratio_count"] + 1


async def test_no_refusal_is_admitted_without_probes(train: Train) -> None:
    trained = await train(probe=0)
    for _ in range(70):
        trained.refused(deadline=first(trained.clock.after(0.1)))


async def test_admitted_requests_that_are_late_and_their_ratio_are_counted(train: Train) -> None:
    trained = await train()
    before = values(trained.dataplane)
    trained.ask(deadline=Deadline(first_ns=trained.clock.after(3), asked=True))
    await trained.serve_one(1)
    await trained.serve_one(20)
    counts = values(trained.dataplane)
    assert counts["admitted_late_total"] - before["admitted_late_total"] == 1
    assert counts["admission_wait_ratio_sum"] - before["admission_wait_ratio_sum"] > 2


async def test_a_whole_answer_includes_its_expected_tokens_up_to_their_limit(train: Train) -> None:
    trained = await train()
    for _ in range(20):
        trained.ask()
        await trained.serve_one(10, count=11)
    deadline = whole(trained.clock.after(19))
    first_only = first(trained.clock.after(19))
    trained.ask(deadline=first_only)
    trained.streams.pop().close()
    assert "its whole answer is expected" in trained.refused(deadline=deadline).message
    trained.ask(deadline=deadline, parameters={"max_tokens": 1}).close()


async def test_wishes_refuse_only_where_they_are_enforced_and_count_as_met(train: Train) -> None:
    slo = Deadline(slo_first_ns=2 * SECOND, slo_token_ns=SECOND, asked=True)
    enforcing, lenient = await train(enforce_slo=True), await train()
    for each in (enforcing, lenient):
        for _ in range(4):
            each.ask()
    enforcing.refused(deadline=slo, received_ns=enforcing.clock.ns)
    lenient.ask(deadline=slo, received_ns=lenient.clock.ns)
    trained = await train()
    trained.ask(deadline=slo)
    await trained.serve_one(0.1)
    await trained.serve_one(0.1)
    trained.ask(deadline=slo)
    await trained.serve_one(30)
    counts = values(trained.dataplane)
    assert (counts["slo_requests_total"], counts["slo_met_total"]) == (2, 1)


async def test_a_quiet_tenant_of_a_fair_queue_is_admitted_next_to_a_flood(train: Train) -> None:
    trained = await train(tenants=Tenants({"quiet": TenantRules(weight=2.0)}), is_fair=True)
    flood, quiet = Caller(tenant="flood"), Caller(tenant="quiet")
    for _ in range(8):
        trained.ask(caller=flood)
    due = first(trained.clock.after(4))
    trained.refused(caller=flood, deadline=due)
    trained.ask(caller=quiet, deadline=due)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_slow_reader_does_not_make_the_answers_of_others_late(
    train: Train, is_cancelled: bool
) -> None:
    """It reads the end, or leaves, long after the engine has made its tokens."""
    trained = await train()
    stream = trained.streams.pop()
    execution = await trained.instance.begun()
    for secs in (1, 1, 2000 if is_cancelled else 1):
        trained.clock.ns = trained.clock.after(secs)
        execution.answer(tokens(1))
        await settle()
    trained.clock.ns = trained.clock.after(2000)
    if is_cancelled:
        stream.cancel()
    else:
        execution.answer(tokens(0, final=True))
        execution.end()
        await soon(read_all(stream))
    trained.ask(deadline=whole(trained.clock.after(60)))


async def test_answers_of_the_response_cache_tell_nothing_of_waits(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = await train()
    await trained.serve_one()
    with monkeypatch.context() as patched:
        patched.setattr(Record, "is_hit", True)
        for _ in range(5):
            trained.ask()
            await trained.serve_one(100)
    trained.ask(deadline=first(trained.clock.after(1.5)))


class Batches:
    """A model that executes 8 rows at once, a second long, and requests with some rows to it."""

    def __init__(self, serve: Serve, clock: Clock, rows: int) -> None:
        self._instance, self._clock, self._rows = ScriptedInstance(concurrency=1), clock, rows
        config = replace(NUMBERS, name="m0", max_batch_size=8, dynamic_batching=DynamicBatching())
        self.dataplane = plane(serve(self._instance, config=config))

    def ask(self, secs: float) -> ResponseStream:
        """A request whose first response is to come within this time."""
        deadline = first(self._clock.after(secs))
        return self.dataplane.infer(request("r", 0, "", self._rows, deadline=deadline))

    async def serve_one(self, stream: ResponseStream) -> None:
        """Execute the next request, which is that of a stream."""
        execution = await self._instance.begun()
        self._clock.ns = self._clock.after(1)
        execution.answer(answer_of(100))
        execution.end()
        await soon(stream.only())


async def test_requests_behind_full_batches_have_waited(serve: Serve, clock: Clock) -> None:
    """The room is in rows: a model without requests answers at once, and a full one does not."""
    batches, clients = Batches(serve, clock, 8), 7
    for _ in range(4):
        for stream in [batches.ask(1e6) for _ in range(clients)]:
            await batches.serve_one(stream)
    idle = batches.ask(1.5)
    await batches.serve_one(idle)
    waiting = [batches.ask(1e6) for _ in range(clients - 1)]
    with pytest.raises(Refusal):
        batches.ask(clients - 1)
    waiting.append(batches.ask(2 * clients))
    for stream in waiting:
        await batches.serve_one(stream)
    assert values(batches.dataplane)["refused_total"] == 1
    assert values(batches.dataplane)["admitted_late_total"] == 0


@pytest.mark.parametrize("rows", [5, 7, 8])
async def test_a_request_whose_rows_do_not_fit_with_those_in_flight_has_waited(
    serve: Serve, clock: Clock, rows: int
) -> None:
    batches = Batches(serve, clock, rows)
    streams = [batches.ask(1e6), batches.ask(1e6)]
    for _ in range(60):
        await batches.serve_one(streams.pop(0))
        streams.append(batches.ask(1e6))
    for stream in streams:
        await batches.serve_one(stream)
    await batches.serve_one(batches.ask(1.5))
    busy = batches.ask(1e6)
    with pytest.raises(Refusal):
        batches.ask(1.5)
    await batches.serve_one(busy)
