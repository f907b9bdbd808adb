"""Accounts of requests that end early, follow in parts, or are answered by the cache."""

import gc
from collections import Counter
from dataclasses import replace

import pytest

from gateway.admission.booking import Booking
from gateway.admission.quotas import LimitKind
from gateway.errors import Code, InferenceError, Refusal
from gateway.models.gen_ai_metrics import GenAiMetrics
from gateway.observability.request_record import Record
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules, Tenants
from gateway.schedulers.service import Service
from tests.builders import ScriptedInstance, read_all, settle, soon, text_request
from tests.conftest import Serve
from tests.gateway.admission.limited import TOKENS, Gateway, answer
from tests.gateway.models.cached import cached


async def used(gateway: Gateway, instance: ScriptedInstance) -> None:
    """Let a request be executed."""
    with gateway.infer() as stream:
        (await instance.begun()).finish("done")
        await soon(read_all(stream))
    await settle()


async def test_a_prompt_that_its_caller_ends_before_the_first_token_has_been_used(
    serve: Serve,
) -> None:
    """Else it would be free to let the model read prompts without end."""
    instance = ScriptedInstance(concurrency=1)
    rules = TenantRules(tokens_per_minute=6000.0, compute_ms_per_minute=1e9)
    gateway = Gateway(serve(instance), a=rules)
    stream = gateway.infer("x" * 400, max_tokens=500)
    queued = gateway.infer("x" * 400, max_tokens=500)
    await instance.begun()
    queued.cancel()
    stream.cancel()
    assert gateway.left(LimitKind.TOKENS) == 6000 - 100
    assert gateway.left(LimitKind.COMPUTE_MS) == 1e9
    stream.put(answer(100, 20))
    assert gateway.left(LimitKind.TOKENS) == 6000 - 120
    await settle()


async def test_the_accounts_of_an_ended_request_are_freed_without_the_garbage_collector(
    serve: Serve,
) -> None:
    instance = ScriptedInstance()
    rules = {"a": TenantRules(requests_per_minute=60.0)}
    gateway = Gateway(serve(instance, tenants=Tenants(rules)), **rules)
    gateway.dataplane.gen_ai = GenAiMetrics()
    await used(gateway, instance)
    gc.collect()
    gc.disable()
    try:
        await used(gateway, instance)
        kinds = Counter(type(each) for each in gc.get_objects())
    finally:
        gc.enable()
    assert [kinds[each] for each in (Record, Booking, Service)] == [0, 0, 0]


async def test_a_prompt_that_fails_before_the_first_token_costs_nothing(serve: Serve) -> None:
    instance = ScriptedInstance()
    gateway = Gateway(serve(instance), a=TOKENS)
    stream = gateway.infer("x" * 400)
    (await instance.begun()).answer(InferenceError(Code.INVALID_ARG, "no such parameter"))
    with pytest.raises(InferenceError):
        await soon(read_all(stream))
    assert gateway.left(LimitKind.TOKENS) == 6000
    await settle()


async def test_compute_time_must_be_there_for_all_requests_that_follow_in_parts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Record, "compute_ms", lambda record, now: 2.0)
    instance = ScriptedInstance()
    model = serve(instance)
    rules = TenantRules(requests_per_minute=100.0, compute_ms_per_minute=6.0)
    gateway = Gateway(model, a=rules)
    await used(gateway, instance)
    with pytest.raises(Refusal, match="milliseconds of compute time") as caught:
        gateway.admission.take_requests(Caller(tenant="a"), model, 11)
    assert caught.value.advice.limit == LimitKind.COMPUTE_MS
    gateway.admission.take_requests(Caller(tenant="a"), model, 9)
    assert gateway.left(LimitKind.REQUESTS) == 90
    prepaid = replace(text_request(caller=Caller(tenant="a")), prepaid=True)
    gateway.dataplane.infer(prepaid).close()
    assert gateway.left(LimitKind.REQUESTS) == 90
    await settle()


async def test_answers_of_the_response_cache_tell_nothing_of_the_cost_of_a_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_ms = Record.compute_ms
    instance = ScriptedInstance()
    model, _ = cached(serve, instance)
    gateway = Gateway(model, a=TenantRules(compute_ms_per_minute=600.0))
    monkeypatch.setattr(Record, "compute_ms", lambda record, now: 2.0)
    await used(gateway, instance)
    monkeypatch.setattr(Record, "compute_ms", compute_ms)
    with gateway.infer() as stream:
        assert stream.done
        await soon(read_all(stream))
    assert gateway.left(LimitKind.COMPUTE_MS) == 598
    with gateway.infer("other"):
        assert gateway.left(LimitKind.COMPUTE_MS) == pytest.approx(598 - 0.4)
    await settle()
