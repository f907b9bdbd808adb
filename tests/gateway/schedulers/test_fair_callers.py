"""Requests that other parts of the server pass to a fair queue: turns, steps, look-ups."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.config.scheduling import EnsembleScheduling
from gateway.dataplane import DataPlane
from gateway.ensembles.backend import EnsembleInstance
from gateway.errors import Code, InferenceError
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.stream import ResponseStream
from tests.builders import TEXT, ScriptedInstance, read_all, settle, soon, text_request
from tests.conftest import Serve
from tests.gateway.conversations.chats import chat, dataplane_of, told, turn
from tests.gateway.ensembles.chains import call
from tests.gateway.schedulers.fair_queues import answer, tenants, text_of

CALLERS: Mapping[str, Caller] = {each: Caller(tenant=each) for each in "ab"}
STOPPING = InferenceError(Code.UNAVAILABLE, "the server is shutting down")


def ask(
    dataplane: DataPlane, tenant: str, conversation: int, text: str = "x", *, start: bool = False
) -> ResponseStream:
    """Submit a turn."""
    return dataplane.infer(turn(text, conversation, start=start, caller=CALLERS[tenant]))


async def test_a_turn_of_a_conversation_has_its_turn_once_the_one_before_has_ended(
    serve: Serve,
) -> None:
    instance = ScriptedInstance(concurrency=1)
    dataplane = dataplane_of(serve(instance, config=chat(), tenants=tenants()))
    streams = [ask(dataplane, "b", 1, "one", start=True), ask(dataplane, "b", 1, "two")]
    streams += [ask(dataplane, "a", number, str(number), start=True) for number in range(2, 8)]
    found = []
    for _ in streams:
        execution = await instance.begun()
        found.append(told(execution)[-1]["content"])
        answer(execution, tokens=10)
        await settle()
    assert found == ["one", "2", "3", "two", *"4567"], "2 and 3 were released before it came"
    for each in streams:
        assert await soon(read_all(each)) == ["done"]


async def test_turns_that_wait_for_their_conversation_count_for_their_tenant(
    serve: Serve,
) -> None:
    model = serve(ScriptedInstance(concurrency=1), config=chat(max_in_flight=40), tenants=tenants())
    dataplane = dataplane_of(model)
    ask(dataplane, "b", 1, start=True)
    for conversation in (2, 3):
        ask(dataplane, "a", conversation, start=True)
        for _ in range(8):
            ask(dataplane, "a", conversation)
    for _ in range(2):
        ask(dataplane, "a", 4, start=True)
    with pytest.raises(InferenceError, match="requests of tenant 'a' in flight"):
        ask(dataplane, "a", 5, start=True)
    ask(dataplane, "b", 1)
    assert in_flight(model) == {"a": 20, "b": 2}
    model.requests.abandon(STOPPING)
    await settle()
    assert in_flight(model) == {}


def in_flight(model: Model) -> dict[str, float]:
    """The requests of each tenant."""
    assert model.fair is not None
    samples = [each for family in model.fair.families({}) for each in family.samples]
    counted = [each for each in samples if each.name == "gateway_tenant_in_flight"]
    return {each.labels["tenant"]: each.value for each in counted}


async def test_a_step_of_an_ensemble_waits_for_the_share_of_the_caller(serve: Serve) -> None:
    member = ScriptedInstance(concurrency=1)
    model = serve(member, config=replace(TEXT, name="m"), tenants=tenants())
    config = replace(
        TEXT,
        name="e",
        ensemble_scheduling=EnsembleScheduling(step=(call("m", "text_input", "text_output"),)),
    )
    ensemble = serve(EnsembleInstance(config, {("m", -1): model}), config=config)
    streams = [
        ensemble.submit(text_request(text, model="e", caller=CALLERS[tenant]))
        for tenant, text in zip("aaaaab", "12345x", strict=True)
    ]
    found = []
    for _ in streams:
        execution = await member.begun()
        found.append(text_of(execution))
        execution.finish("done")
    assert found == ["1", "2", "x", "3", "4", "5"] or found == ["1", "2", "3", "x", "4", "5"]
    for each in streams:
        assert await soon(read_all(each)) == ["done"]
