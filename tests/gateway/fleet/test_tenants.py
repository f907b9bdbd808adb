"""Tenants of replicas, whose requests come from a router."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.policy.caller import Caller
from gateway.settings import FleetSettings, HttpSettings, ModelSettings
from gateway.stream import ResponseStream
from tests.builders import soon, text_request
from tests.conformance.keys import write
from tests.conformance.models import HOLD, identity
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.in_one_loop import SETTINGS, metrics, pair, running
from tests.serving import held, series, write_model

MOST = 17
"""The limit of the model: one more than any tenant may have."""
REQUESTS, ENDED, DELAY_US = 200, 160, 10_000
HOLDING = identity("BYTES", "1", max_in_flight=MOST, **HOLD)


async def test_a_flood_of_a_tenant_leaves_another_one_its_room_at_the_replica(
    tmp_path: Path,
) -> None:
    models, nothing, keys = (tmp_path / each for each in ("models", "nothing", "keys.toml"))
    config = HOLDING.replace("INPUT", "text_input").replace("OUTPUT", "text_output")
    write_model(models, "text", config)
    nothing.mkdir()
    write(keys, "[tenants.flood]", "[tenants.quiet]")
    callers = {each: Caller(tenant=each) for each in ("flood", "quiet")}
    http = HttpSettings(address="127.0.0.1", port=0)
    guarded = {"api_keys": keys, "http": http}
    async with pair(models, nothing, of_replica=guarded) as (router, replica):

        def ask(tenant: str) -> ResponseStream:
            return router.infer(text_request("x", caller=callers[tenant]))

        with held(models, "text"):
            streams = [ask("flood") for _ in range(MOST)]
            await until(lambda: replica.in_flight == MOST)
            with pytest.raises(InferenceError, match="requests of tenant 'flood' in flight"):
                await soon(ask("flood").only())
            streams.append(ask("quiet"))
            await until(lambda: replica.in_flight == MOST + 1)
        for each in streams:
            await soon(each.only())


async def test_two_replicas_are_each_fair_by_weight_for_themselves(tmp_path: Path) -> None:
    models, nothing, keys = (tmp_path / each for each in ("models", "nothing", "keys.toml"))
    config = identity("BYTES", "1", delay_us=DELAY_US)
    config = config.replace("INPUT", "text_input").replace("OUTPUT", "text_output")
    write_model(models, "text", config)
    nothing.mkdir()
    write(keys, "[tenants.three]\nweight = 3", "[tenants.one]")
    hosting = replace(
        SETTINGS,
        models=ModelSettings(repositories=(models,)),
        fleet=FleetSettings(port=0),
        api_keys=keys,
        http=HttpSettings(address="127.0.0.1", port=0),
    )
    async with running(hosting) as (one, at), running(hosting) as (other, there):
        addresses = tuple(("127.0.0.1", ports["fleet"]) for ports in (at, there))
        fleet = FleetSettings(replicas=addresses)
        routing = replace(SETTINGS, models=ModelSettings(repositories=(nothing,)), fleet=fleet)
        async with running(routing) as (router, _):
            callers = [Caller(tenant=each) for each in ("three", "one")]
            streams = [
                router.dataplane.infer(text_request("x", caller=caller))
                for _ in range(REQUESTS)
                for caller in callers
            ]
            await until(lambda: sum(each.done for each in streams) >= ENDED)
            for replica in (one, other):
                three, rest = [await service(replica.dataplane, each.tenant) for each in callers]
                assert rest > ENDED / 10 * DELAY_US / 1000, "each replica serves a share"
                assert 1.8 < three / rest < 4.8
            for each in streams:
                each.cancel()


async def service(replica: DataPlane, tenant: str) -> float:
    """The milliseconds of a tenant so far."""
    page = await metrics(replica)
    return page[series("gateway_tenant_service_total", "text", tenant=tenant, kind="compute_ms")]
