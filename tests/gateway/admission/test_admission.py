"""Admission and the accounts of requests, over a data plane with models that tests drive."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.admission.costs import FIRST_ANSWER
from gateway.admission.quotas import LimitKind
from gateway.errors import IN_FLIGHT, Code, InferenceError, Refusal, RefusalReason
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.policy.tenants import NO_RULES, TenantRules, Tenants
from tests.builders import (
    TEXT,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
)
from tests.conftest import Serve
from tests.gateway.admission.deadline_planes import plane, samples
from tests.gateway.admission.limited import TOKENS, Gateway, answer
from tests.gateway.ensembles.chains import chain


async def test_a_tenant_has_its_requests_per_minute_and_another_is_not_concerned(
    serve: Serve,
) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(requests_per_minute=2.0))
    for _ in range(2):
        gateway.infer().close()
    refusal = gateway.refused()
    assert (refusal.code, refusal.refusal_reason) == (Code.UNAVAILABLE, RefusalReason.RATE_LIMITED)
    assert refusal.message == (
        "tenant 'a' has 0 of 2 requests per minute left, the request needs 1: in 30.0 s"
    )
    assert refusal.advice.retry_after_secs == pytest.approx(30 * 1.25)
    assert refusal.advice.headers["x-ratelimit-remaining-requests"] == "0"
    gateway.infer(tenant="b").close()
    gateway.infer(tenant="").close()
    gateway.clock.secs += 30
    gateway.infer().close()
    await settle()


async def test_tokens_are_booked_before_and_corrected_at_the_end(serve: Serve) -> None:
    instance = ScriptedInstance()
    gateway = Gateway(serve(instance), a=TOKENS)
    with gateway.infer(max_tokens=100, n=2) as stream:
        assert gateway.left(LimitKind.TOKENS) == 6000 - 1 - 200
        (await instance.begun()).answer(answer(10, 30, cached=5))
        await soon(read_all(stream))
    assert gateway.left(LimitKind.TOKENS) == pytest.approx(6000 - 5 - 0.5 - 30)
    await settle()


async def test_an_answer_longer_than_booked_leaves_a_debt(serve: Serve) -> None:
    instance = ScriptedInstance()
    gateway = Gateway(serve(instance), a=TOKENS)
    with gateway.infer() as stream:
        assert gateway.left(LimitKind.TOKENS) == 6000 - 1 - FIRST_ANSWER
        (await instance.begun()).answer(answer(1, 7000))
        await soon(read_all(stream))
    assert gateway.left(LimitKind.TOKENS) == -1001
    assert gateway.refused(max_tokens=1).advice.limit == LimitKind.TOKENS
    await settle()


async def test_a_cancelled_request_has_used_what_was_made(serve: Serve) -> None:
    instance = ScriptedInstance()
    gateway = Gateway(
        serve(instance, config=replace(TEXT, model_transaction_policy=None)), a=TOKENS
    )
    stream = gateway.infer(max_tokens=500)
    execution = await instance.begun()
    execution.answer(replace(answer(4, 6), final=False))
    await settle()
    stream.cancel()
    assert gateway.left(LimitKind.TOKENS) == 6000 - 10
    assert gateway.in_flight() == 0
    await settle()


async def test_a_request_that_the_model_refuses_has_cost_one_request_and_no_tokens(
    serve: Serve,
) -> None:
    rules = TenantRules(requests_per_minute=60.0, tokens_per_minute=6000.0, max_in_flight=4)
    gateway = Gateway(serve(ScriptedInstance()), a=rules)
    with pytest.raises(InferenceError):
        gateway.dataplane.infer(InferRequest(model="text", caller=Caller(tenant="a")))
    assert gateway.left(LimitKind.REQUESTS) == 59
    assert gateway.left(LimitKind.TOKENS) == 6000
    assert gateway.in_flight() == 0


async def test_a_request_refused_by_its_tokens_has_cost_one_request(serve: Serve) -> None:
    rules = TenantRules(requests_per_minute=60.0, tokens_per_minute=6000.0)
    gateway = Gateway(serve(ScriptedInstance()), a=rules)
    gateway.infer(max_tokens=5000).close()
    gateway.refused(max_tokens=6000)
    with gateway.infer(max_tokens=5000):
        gateway.refused(max_tokens=5000)
        assert gateway.left(LimitKind.TOKENS) == 6000 - 5001
    assert gateway.left(LimitKind.REQUESTS) == 56
    await settle()


async def test_tokens_that_no_bucket_holds_are_refused_for_good(serve: Serve) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TOKENS)
    refusal = gateway.refused(max_tokens=2**63)
    assert refusal.message == (
        "tenant 'a' may use 6000 tokens at once, the request needs 9223372036854775808; "
        "lower 'max_tokens', or 'n'"
    )
    assert (refusal.advice.retries, refusal.advice.retry_after_secs) == (False, 0)


async def test_each_prompt_of_a_batch_is_a_request(serve: Serve) -> None:
    batched = replace(TEXT, max_batch_size=8)
    gateway = Gateway(
        serve(ScriptedInstance(), config=batched), a=TenantRules(requests_per_minute=3.0)
    )
    two = replace(text_request("a").inputs[0], shape=(2, 1), data=(b"a", b"b"))
    asked = InferRequest(model="text", inputs=(two,), caller=Caller(tenant="a"))
    gateway.dataplane.infer(asked).close()
    assert gateway.left(LimitKind.REQUESTS) == 1
    with pytest.raises(Refusal):
        gateway.dataplane.infer(asked)
    await settle()


async def test_requests_in_flight_are_limited_and_an_end_makes_room(serve: Serve) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(max_in_flight=2))
    first, second = gateway.infer(), gateway.infer()
    refusal = gateway.refused()
    assert refusal.message == "tenant 'a' has 2 requests in flight, the most of 2"
    assert (refusal.advice.limit, refusal.advice.headers) == ("in_flight", {})
    first.close()
    gateway.infer().close()
    second.close()
    assert gateway.in_flight() == 0
    await settle()


async def test_compute_time_is_that_of_the_execution(serve: Serve) -> None:
    instance = ScriptedInstance()
    rules = TenantRules(compute_ms_per_minute=1e9)
    gateway = Gateway(serve(instance), a=rules)
    stream = gateway.infer()
    execution = await instance.begun()
    await asyncio.sleep(0.002)
    execution.finish("done")
    await soon(read_all(stream))
    stream.close()
    assert gateway.left(LimitKind.COMPUTE_MS) <= 1e9 - 2
    await settle()


async def test_a_tenant_that_is_removed_while_it_streams_ends_its_account(serve: Serve) -> None:
    instance = ScriptedInstance()
    gateway = Gateway(serve(instance), a=TOKENS)
    stream = gateway.infer(max_tokens=100)
    gateway.tenants.replace({})
    assert gateway.tenants.rules("a") is NO_RULES
    gateway.infer(max_tokens=2**62).close()
    (await instance.begun()).answer(answer(10, 30))
    await soon(read_all(stream))
    stream.close()
    gateway.tenants.replace({"a": TOKENS})
    assert gateway.left(LimitKind.TOKENS) == 6000 - 40
    assert gateway.in_flight() == 0
    await settle()


async def test_changed_limits_hold_for_the_next_request_and_buckets_keep_their_state(
    serve: Serve,
) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(requests_per_minute=4.0))
    gateway.infer().close()
    gateway.infer().close()
    gateway.tenants.replace({"a": TenantRules(requests_per_minute=2.0)})
    assert gateway.left(LimitKind.REQUESTS) == 1
    gateway.infer().close()
    gateway.refused()
    await settle()


async def test_a_flood_of_refusals_has_one_line_a_second_of_its_tenant(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.admission")
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(max_in_flight=0))
    for _ in range(50):
        gateway.refused()
    gateway.clock.secs += 1
    gateway.refused()
    lines = [vars(each) for each in caplog.records if each.name == "sluice.admission"]
    assert [(each["tenant"], each["limit"], each["count"]) for each in lines] == [
        ("a", "in_flight", 1),
        ("a", "in_flight", 50),
    ]


async def test_refusals_are_counted_by_model_and_reason(serve: Serve) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(max_in_flight=0))
    assert samples(gateway.dataplane) == []
    gateway.refused()
    gateway.refused()
    assert samples(gateway.dataplane) == [
        ({"model": "text", "version": "1", "reason": "rate_limited"}, 2)
    ]
    assert gateway.admission.families() == []
    (described,) = gateway.admission.describe()
    assert described["refused"] == {"in_flight": 2}
    assert described["rules"]["max_in_flight"] == 0


async def test_a_server_whose_tenants_have_no_limits_taps_no_request(serve: Serve) -> None:
    model = serve(ScriptedInstance())
    gateway = Gateway(model, a=TenantRules(weight=2.0))
    assert gateway.admission.admit(text_request(caller=Caller(tenant="a")), model, None) is None


async def test_the_advised_wait_is_at_most_a_minute(serve: Serve) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(requests_per_minute=0.5, burst=2.0))
    gateway.infer().close()
    assert gateway.refused().advice.retry_after_secs == 60
    await settle()


async def test_requests_that_follow_in_parts_are_refused_before_the_first(serve: Serve) -> None:
    model = serve(ScriptedInstance())
    gateway = Gateway(model, a=TenantRules(requests_per_minute=3.0), b=TOKENS)
    with pytest.raises(Refusal) as caught:
        gateway.admission.take_requests(Caller(tenant="a"), model, 4)
    assert caught.value.message == ("tenant 'a' may use 3 requests at once, the request needs 4")
    assert samples(gateway.dataplane) == [
        ({"model": "text", "version": "1", "reason": "rate_limited"}, 1)
    ]
    assert not caught.value.advice.retries
    assert gateway.left(LimitKind.REQUESTS) == 3
    gateway.admission.take_requests(Caller(tenant="a"), model, 2)
    assert gateway.left(LimitKind.REQUESTS) == 1
    for tenant in ("b", "unknown", ""):
        gateway.admission.take_requests(Caller(tenant=tenant), model, 10_000)
    gateway.admission.take_requests(None, model, 10_000)


class Chooser:
    """Chooses the only version, and counts its refusals."""

    has_keys = False

    def __init__(self, model: Model) -> None:
        self.model = model
        self.refusals: list[str] = []

    def choose(self, request: InferRequest) -> tuple[Model, None]:
        return self.model, None

    def refused(self, request: InferRequest, model: Model, error: InferenceError) -> None:
        self.refusals.append(error.message)


async def test_a_limit_of_a_tenant_is_no_evidence_about_a_version(serve: Serve) -> None:
    model = serve(ScriptedInstance())
    chooser = Chooser(model)
    model.chooser = chooser  # type: ignore[assignment]
    gateway = Gateway(model, a=TenantRules(max_in_flight=0))
    gateway.refused()
    assert chooser.refusals == []
    with pytest.raises(InferenceError, match="expected 1 inputs"):
        gateway.dataplane.infer(InferRequest(model="text"))
    assert len(chooser.refusals) == 1


async def test_tokens_that_are_made_after_the_end_are_taken_too(serve: Serve) -> None:
    instance = ScriptedInstance()
    gateway = Gateway(serve(instance), a=TOKENS)
    stream = gateway.infer(max_tokens=500)
    execution = await instance.begun()
    stream.abandon(InferenceError(Code.UNAVAILABLE, "the server is shutting down"))
    assert gateway.left(LimitKind.TOKENS) == 6000
    stream.put(answer(0, 20))
    assert gateway.left(LimitKind.TOKENS) == 6000 - 20
    execution.end()
    await settle()


async def test_requests_that_wait_and_those_without_limits_are_counted_at_all_models(
    serve: Serve,
) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TOKENS, b=TenantRules(weight=2.0))
    waiting, in_flight = {"a": 3, "b": 0}, {"a": 7, "b": 10}
    queue = SimpleNamespace(waiting=waiting.__getitem__)
    models: Any = [SimpleNamespace(fair=each) for each in (queue, None, queue)]
    with gateway.infer():
        found = gateway.admission.describe(models, in_flight)
    shown = [(each["tenant"], each["waiting"], each["in_flight"]) for each in found]
    assert shown == [("a", 6, 1), ("b", 0, 10)]
    await settle()


async def test_a_request_of_an_ensemble_or_with_requests_of_its_model_is_one_in_flight(
    serve: Serve,
) -> None:
    ensemble, caller = chain(serve), Caller(tenant="a")
    dataplane = plane(ensemble.model, *ensemble.models.values())
    with (
        dataplane.infer(text_request(model="e", caller=caller)),
        dataplane.infer(text_request(model="b", caller=caller)),
        dataplane.call(text_request(model="b", caller=caller)),
        dataplane.infer(text_request(model="b", caller=Caller(tenant="b"))),
    ):
        await ensemble["a"].begun()
        assert dataplane.running.by_tenant() == {"a": 2, "b": 1}
    await settle()
    assert dataplane.running.by_tenant() == {}


async def test_steps_of_an_ensemble_and_requests_that_a_model_makes_are_not_booked(
    serve: Serve,
) -> None:
    ensemble, caller = chain(serve), Caller(tenant="a")
    gateway = Gateway(ensemble.model, a=TenantRules(requests_per_minute=60.0, max_in_flight=1))
    dataplane = plane(ensemble.model, *ensemble.models.values())
    dataplane.admission = gateway.admission
    with dataplane.infer(text_request(model="e", caller=caller)) as stream:
        (await ensemble["a"].begun()).finish("m")
        dataplane.call(text_request(model="a", caller=caller)).cancel()
        (await ensemble["b"].begun()).finish("end")
        assert gateway.in_flight() == 1
        assert await soon(read_all(stream)) == ["end"]
    assert gateway.left(LimitKind.REQUESTS) == 59
    await settle()


async def test_accounts_without_limits_are_dropped_once_there_are_many(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admission.admission.MOST_ACCOUNTS", 2)
    few = TenantRules(requests_per_minute=60.0)
    gateway = Gateway(serve(ScriptedInstance()), a=few, b=few)
    gateway.infer().close()
    held = gateway.infer(tenant="b")
    gateway.tenants.replace({"c": few})
    gateway.infer(tenant="c").close()
    assert [each["tenant"] for each in gateway.admission.describe()] == ["b", "c"]
    held.close()
    await settle()


async def test_a_full_model_refuses_as_overloaded_and_is_counted(serve: Serve) -> None:
    model = serve(ScriptedInstance(), config=replace(TEXT, parameters={"max_in_flight": "1"}))
    gateway, chooser = Gateway(model, a=TOKENS), Chooser(model)
    model.chooser = chooser  # type: ignore[assignment]
    with gateway.infer():
        refusal = gateway.refused()
        assert gateway.left(LimitKind.TOKENS) == 6000 - 1 - FIRST_ANSWER
    assert refusal.refusal_reason is RefusalReason.OVERLOADED
    assert (refusal.advice.retry_after_secs, refusal.advice.retries) == (1, True)
    assert samples(gateway.dataplane) == [
        ({"model": "text", "version": "1", "reason": "overloaded"}, 1)
    ]
    assert chooser.refusals == [refusal.message]
    await settle()


async def test_the_share_of_a_tenant_is_its_limit_and_no_evidence_about_a_version(
    serve: Serve,
) -> None:
    config = replace(TEXT, parameters={"max_in_flight": "8"})
    rules = {"a": TenantRules(), "b": TenantRules()}
    model = serve(ScriptedInstance(), config=config, tenants=Tenants(rules))
    gateway, chooser = Gateway(model, **rules), Chooser(model)
    model.chooser = chooser  # type: ignore[assignment]
    streams = [gateway.infer() for _ in range(16)]
    refusal = gateway.refused()
    assert (refusal.refusal_reason, refusal.advice.limit) == (RefusalReason.RATE_LIMITED, IN_FLIGHT)
    assert chooser.refusals == []
    for stream in streams:
        stream.close()
    await settle()
