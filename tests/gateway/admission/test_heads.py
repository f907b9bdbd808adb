"""Refusals of requests by their heads: what they cost, and that a whole request has no other."""

import logging
import random
from typing import Any

import pytest

from gateway.admission.admission import admission_families
from gateway.admission.quotas import LimitKind
from gateway.errors import Refusal
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules
from tests.builders import ScriptedInstance, settle
from tests.conftest import Serve
from tests.gateway.admission.limited import TOKENS, Gateway

FEW = TenantRules(requests_per_minute=2.0, max_in_flight=2)


def head(gateway: Gateway, tenant: str = "a", *, is_named: bool = True) -> Refusal | None:
    """The refusal of a request by its head, which names the model or leaves that to the body."""
    model = gateway.dataplane.model("text") if is_named else None
    try:
        gateway.dataplane.check_head(Caller(tenant=tenant), model)
    except Refusal as error:
        return error
    return None


async def test_a_head_is_refused_as_the_whole_request_and_costs_nothing(serve: Serve) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=FEW)
    assert head(gateway) is None
    for _ in range(2):
        gateway.infer().close()
    refusal, late = head(gateway), gateway.refused()
    assert refusal is not None
    assert (refusal.message, refusal.advice) == (late.message, late.advice)
    assert gateway.left(LimitKind.REQUESTS) == 0
    gateway.clock.secs += 30
    assert head(gateway) is None
    gateway.infer().close()
    await settle()


async def test_a_head_without_a_place_in_flight_costs_one_request(serve: Serve) -> None:
    gateway = Gateway(
        serve(ScriptedInstance()), a=TenantRules(requests_per_minute=60.0, max_in_flight=1)
    )
    with gateway.infer():
        early, late = head(gateway), gateway.refused()
        assert early is not None
        assert early.message == late.message == "tenant 'a' has 1 requests in flight, the most of 1"
        remaining = [
            each.advice.headers["x-ratelimit-remaining-requests"] for each in (early, late)
        ]
        assert remaining == ["58", "57"]
        assert gateway.left(LimitKind.REQUESTS) == 57
    assert head(gateway) is None
    assert gateway.left(LimitKind.REQUESTS) == 57
    await settle()


async def test_a_refused_head_is_counted_once_and_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.admission")
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(max_in_flight=0))
    head(gateway)
    head(gateway, is_named=False)
    (family,) = admission_families(gateway.admission, gateway.dataplane.models())
    counts = {each.labels["model"]: each.value for each in family.samples}
    assert counts == {"text": 1, "": 1}
    (described,) = gateway.admission.describe()
    assert described["refused"] == {"in_flight": 2}
    (line,) = [vars(each) for each in caplog.records if each.name == "sluice.admission"]
    assert (line["tenant"], line["model"], line["limit"]) == ("a", "text", "in_flight")


async def test_other_limits_and_tenants_without_limits_refuse_no_head(serve: Serve) -> None:
    compute = TenantRules(compute_ms_per_minute=0.001)
    gateway = Gateway(serve(ScriptedInstance()), a=TOKENS, b=compute, c=TenantRules(weight=2.0))
    gateway.infer(max_tokens=5999).close()
    for tenant in ("a", "b", "c", "unknown", ""):
        assert head(gateway, tenant) is None
    gateway.dataplane.check_head(None)
    gateway.dataplane.admission = None
    assert head(gateway) is None
    await settle()


async def test_a_server_that_stops_says_so_and_nothing_of_limits(serve: Serve) -> None:
    gateway = Gateway(serve(ScriptedInstance()), a=TenantRules(max_in_flight=0))
    assert head(gateway) is not None
    gateway.dataplane.refuse_requests()
    assert head(gateway) is None


@pytest.mark.parametrize("seed", range(5))
async def test_a_request_with_a_refused_head_is_always_refused(serve: Serve, seed: int) -> None:
    """Also with other limits, and after changes of the rules."""
    source = random.Random(seed)
    gateway = Gateway(serve(ScriptedInstance()), a=FEW)
    held: list[Any] = []
    refusals = 0
    for _ in range(300):
        gateway.clock.secs += source.choice((0, 0, 5, 20))
        if source.random() < 0.05:
            rate = source.choice((None, 0.5, 2.0, 60.0))
            rules = TenantRules(requests_per_minute=rate, max_in_flight=source.choice((None, 1, 3)))
            gateway.tenants.replace({"a": rules})
        if held and source.random() < 0.4:
            held.pop().close()
        if head(gateway) is not None:
            gateway.refused()
            refusals += 1
        elif source.random() < 0.7:
            held.append(gateway.infer())
    assert refusals
    for stream in held:
        stream.close()
    await settle()
