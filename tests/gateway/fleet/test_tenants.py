"""Tenants of a replica, whose requests come from a router."""

from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.policy.caller import Caller
from gateway.settings import HttpSettings
from gateway.stream import ResponseStream
from tests.builders import soon, text_request
from tests.conformance.keys import write
from tests.conformance.models import HOLD, identity
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.in_one_loop import pair
from tests.serving import held, write_model

MOST = 17
"""The limit of the model: one more than any tenant may have."""
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
