"""Requests of tenants in front of a scheduler."""

from dataclasses import replace
from typing import Any

from gateway.backend import MetricReading
from gateway.messages import InferRequest, SequenceTag
from gateway.models.sharing import Sharing
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules, Tenants
from gateway.schedulers.execution import Entry
from tests.builders import Execution, ScriptedInstance, text_response
from tests.gateway.schedulers.queues import Queue, word

EVEN = {"a": TenantRules(), "b": TenantRules()}


def tenants(**rules: TenantRules) -> Tenants:
    """The rules of tenants; by default `a` and `b` have equal ones."""
    return Tenants(rules or EVEN)


def of(tenant: str, request: InferRequest) -> InferRequest:
    """The request as one of a tenant; its sequence, too."""
    tag = request.sequence
    found = None if tag is None else SequenceTag(tag.correlation_id, tag.start, tag.end, tenant)
    return replace(request, caller=Caller(tenant=tenant), sequence=found)


def ask(queue: Queue, tenant: str, *texts: str, **fields: Any) -> list[Entry]:
    """Submit a request of a tenant for each text."""
    return [queue.ask(of(tenant, word(text, **fields))) for text in texts]


def wide(tenant: str, text: str, rows: int) -> InferRequest:
    """A request of a tenant with that many rows."""
    request = word(text)
    tensor = replace(request.inputs[0], shape=(rows, 1), data=(text.encode(),) * rows)
    return of(tenant, replace(request, inputs=(tensor,)))


def in_front(queue: Queue) -> Sharing:
    """The fair queue."""
    assert queue.fair is not None
    return queue.fair


async def served(instance: ScriptedInstance, count: int, tokens: int | None = None) -> list[str]:
    """The texts of the next executions of one request each, in order; each ends at once."""
    found = []
    for _ in range(count):
        execution = await instance.begun()
        found.append(text_of(execution))
        answer(execution, tokens)
    return found


def text_of(execution: Execution) -> str:
    """The text of the only request of an execution."""
    (request,) = execution.requests
    return request.inputs[0].elements()[0].decode()


def answer(execution: Execution, tokens: int | None = None) -> None:
    """Answer its only request; with tokens as an LLM does."""
    execution.answer(text_response("done", final=True, tokens=tokens))
    execution.end()


def sample(families: list[MetricReading], name: str, **labels: str) -> float:
    """The value of the only sample of that name whose labels include these."""
    every = [each for family in families for each in family.samples if each.name == name]
    (value,) = [each.value for each in every if labels.items() <= each.labels.items()]
    return value
