"""A model that tenants share: its limits, and its end with requests that wait in front."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, Refusal, RefusalReason
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.models.repository_control import RepositoryControl
from gateway.observability.statistics import FailureReason, ModelStatistics
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules, Tenants
from gateway.schedulers.fair import LEAST_IN_FLIGHT
from gateway.stream import ResponseStream
from tests.builders import TEXT, ScriptedInstance, read_all, settle, soon, text_request
from tests.conftest import Serve
from tests.gateway.models.sleeping import eventually, given, loaded, stages
from tests.registries import ScriptedBackend, Start, write

STOPPING = InferenceError(Code.UNAVAILABLE, "the server is shutting down")
MOST = 40


def of(tenant: str, text: str = "hello", **fields: object) -> InferRequest:
    return text_request(text, caller=Caller(tenant=tenant), **fields)


def parameters(**values: object) -> ModelConfig:
    return replace(TEXT, parameters={key: str(value) for key, value in values.items()})


@pytest.fixture
async def model(serve: Serve) -> Model:
    """A model of an instance for one request, with a limit of MOST."""
    tenants = Tenants({"a": TenantRules(), "b": TenantRules(), "night": TenantRules(weight=0.0)})
    config = parameters(max_in_flight=MOST)
    return serve(ScriptedInstance(concurrency=1), config=config, tenants=tenants)


def fill(model: Model, tenant: str) -> list[ResponseStream]:
    """Submit requests of a tenant until one is refused, with a text that names it."""
    streams: list[ResponseStream] = []
    with suppress(InferenceError):
        while len(streams) < 3 * MOST:
            streams.append(model.submit(of(tenant)))
    with pytest.raises(Refusal, match=f"requests of tenant '{tenant}' in flight") as refused:
        model.submit(of(tenant))
    reason, advice = refused.value.refusal_reason, refused.value.advice
    assert (reason, advice.limit) == (RefusalReason.RATE_LIMITED, "in_flight")
    assert "all tenants" not in refused.value.message
    return streams


async def ended(model: Model) -> None:
    model.requests.abandon(STOPPING)
    await settle()


async def test_a_model_has_a_fair_queue_only_on_a_server_with_tenants(serve: Serve) -> None:
    assert serve(ScriptedInstance()).fair is None
    model = serve(ScriptedInstance(), tenants=Tenants())
    assert model.scheduler is model.fair


async def test_a_flood_leaves_the_other_tenants_their_share_of_the_requests_in_flight(
    model: Model,
) -> None:
    assert len(fill(model, "a")) == MOST
    assert len(fill(model, "b")) == MOST / 2
    assert len(fill(model, "night")) == LEAST_IN_FLIGHT
    with pytest.raises(
        InferenceError, match="has 40 requests of tenant 'a' in flight, its share is 20 "
    ):
        model.submit(of("a"))
    assert model.statistics.failures[FailureReason.REJECTED] == 7
    await ended(model)


async def test_a_new_weight_counts_from_the_next_request_of_its_tenant_on(model: Model) -> None:
    assert model.fair is not None
    for tenant in "ba":
        model.submit(of(tenant))
    model.fair.tenants.replace({"a": TenantRules(), "b": TenantRules(weight=1.5)})
    for tenant in "ab":
        model.submit(of(tenant))
    assert len(fill(model, "a")) == MOST / 2.5 - 2
    model.fair.tenants.replace({"a": TenantRules(weight=4.5), "b": TenantRules(weight=1.5)})
    assert len(fill(model, "a")) == MOST * 0.75 - MOST / 2.5
    await ended(model)


async def test_all_tenants_together_have_at_most_twice_the_limit(model: Model) -> None:
    for number in range(MOST):
        for _ in range(2):
            model.submit(of(f"t{number}"))
    with pytest.raises(Refusal, match="has 80 requests in flight, the most it accepts") as refused:
        model.submit(of("b"))
    assert refused.value.refusal_reason is RefusalReason.OVERLOADED
    with pytest.raises(Refusal, match="has 80 requests in flight, the most it accepts"):
        model.copy(of("b"), ModelStatistics())
    model.call(of("b"))
    await ended(model)


async def test_without_rules_there_is_one_limit_for_all(serve: Serve) -> None:
    config = parameters(max_in_flight=2)
    model = serve(ScriptedInstance(concurrency=1), config=config, tenants=Tenants())
    for tenant in ("a", "b"):
        model.submit(of(tenant))
    with pytest.raises(InferenceError, match="has 2 requests in flight, the most it accepts"):
        model.submit(of("b"))
    await ended(model)


async def test_requests_that_wait_in_front_end_with_their_model(model: Model) -> None:
    streams = [model.submit(of(tenant)) for tenant in "aaaabb"]
    await settle()
    closing = asyncio.ensure_future(model.close())
    for stream in streams:
        with pytest.raises(InferenceError, match="is being closed"):
            await soon(read_all(stream))
    await soon(closing)


async def test_the_drain_waits_for_requests_in_front(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance, tenants=Tenants({"a": TenantRules()}))
    streams = [model.submit(of("a", text)) for text in "123456"]
    drained = asyncio.ensure_future(model.requests.drained())
    for text in "123456":
        assert not drained.done()
        (await instance.begun()).finish(text)
    await soon(drained)
    assert [await soon(read_all(each)) for each in streams] == [[each] for each in "123456"]


async def test_requests_for_a_model_asleep_wait_in_front(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "m", 1, more=given(residency="on_demand", keep_alive_secs=0))
    control: RepositoryControl = await start(
        tmp_path, tenants=Tenants({"a": TenantRules(), "b": TenantRules()})
    )
    for nth in range(2):
        (model,) = control.registry.models()
        streams = [
            model.submit(of(tenant, text, model="m"))
            for tenant, text in zip("aaab", "123x", strict=True)
        ]
        instance = await loaded(backend, "m", nth)
        for _ in streams:
            (await instance.begun()).finish("done")
        assert [await soon(read_all(each)) for each in streams] == [["done"]] * 4
        await eventually(lambda: stages(control) == {"m": "asleep"})


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e400", "much", ""])
@pytest.mark.parametrize("name", ["fair_prompt_weight", "fair_output_weight"])
async def test_a_wrong_weight_of_tokens_is_refused(serve: Serve, name: str, value: str) -> None:
    config = parameters(**{name: value})
    with pytest.raises(InferenceError, match=f"parameter '{name}' is '{value}', expected a number"):
        serve(ScriptedInstance(), config=config, tenants=Tenants())
