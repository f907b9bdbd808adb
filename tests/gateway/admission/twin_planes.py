"""Two data planes that get the same requests: one has allowances, one looks at each limit."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.admission.admission import Admission
from gateway.backend import Answer, Begun, Instance, Reader
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import Deadline, InferRequest, InferResponse, Phases, Usage
from gateway.models.model import Model
from gateway.models.taps import Allowed
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules, Tenants
from gateway.schedulers.charges import WAIT
from gateway.schedulers.fair import FairScheduler
from gateway.schedulers.shares import UNITS
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, array_tensor
from tests.builders import LoadedModels, settle
from tests.conftest import Serve
from tests.gateway.admission.deadline_planes import first
from tests.gateway.admission.limited import Clock

NUMBERS = ModelConfig(
    name="numbers",
    backend="identity",
    max_batch_size=8,
    input=(ModelInput(name="IN", data_type=DataType.TYPE_FP32, dims=(1,)),),
    output=(ModelOutput(name="OUT", data_type=DataType.TYPE_FP32, dims=(1,)),),
)
"""A model without tokens."""
BROKEN = InferenceError(Code.INVALID_ARG, "no such number")


RULES = {
    "wide": TenantRules(requests_per_minute=60_000.0, tokens_per_minute=1e6, max_in_flight=40),
    "timed": TenantRules(compute_ms_per_minute=0.6, burst=1000.0),
    "narrow": TenantRules(requests_per_minute=900.0, burst=0.05, weight=2.0),
    "flying": TenantRules(max_in_flight=5),
    "free": TenantRules(weight=3.0),
    "late": TenantRules(requests_per_minute=6000.0, weight=0.5, highest_priority=2),
}
"""Tenants whose limits are reached at different times, and never."""
NS_PER_SECOND = 1_000_000_000


class NoAllowances(dict[str, Allowed]):
    """Keeps no allowance, so that each request is looked at."""

    def __setitem__(self, tenant: str, allowance: Allowed) -> None:
        """Keep nothing, nor does the account of the tenant."""
        allowance.end()


class Held:
    """An execution that ends when it is answered; when it is abandoned at once, if it can."""

    def __init__(self, instance: "HeldInstance", name: str) -> None:
        self._instance, self._name = instance, name

    def abandon(self) -> None:
        held = self._instance
        reader = None if self._name in held.lasting else held.begun.pop(self._name, None)
        if reader is not None:
            reader.over(None)


class HeldInstance(Instance):
    """Executes requests until the test answers them; `begun` has their readers by their ids.

    Executions of those that are `lasting` do not end before.
    """

    def __init__(self, concurrency: int | None) -> None:
        self.concurrency = concurrency
        self.alive, self.death = True, None
        self.begun: dict[str, Reader] = {}
        self.order: list[str] = []
        self.lasting: set[str] = set()
        self.singles = self

    def accepts(self, request: InferRequest) -> bool:
        return True

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        self.begun[request.id] = reader
        self.order.append(request.id)
        return Held(self, request.id)

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        raise AssertionError("all requests are single ones")
        yield

    async def close(self) -> None:
        """Nothing to close."""


class Plane:
    """A data plane with models of one held instance each, and the streams of its requests."""

    def __init__(
        self, serve: Serve, rooms: Sequence[int | None], rules: Mapping[str, TenantRules]
    ) -> None:
        self.clock, self.tenants = Clock(), Tenants(rules)
        self.instances = [HeldInstance(each) for each in rooms]
        configs = [replace(NUMBERS, name=f"m{number}") for number in range(len(rooms))]
        self.models = [
            serve(instance, config=config, tenants=self.tenants)
            for instance, config in zip(self.instances, configs, strict=True)
        ]
        self.dataplane = DataPlane(LoadedModels(*self.models))  # type: ignore[arg-type]
        self.admission = Admission(self.tenants, self.clock, lambda: 1.25)
        self.dataplane.admission = self.admission
        self.streams: dict[str, ResponseStream] = {}
        self.refused: list[str] = []

    def infer(self, name: str, model: int, tenant: str, rows: int = 1, **fields: Any) -> None:
        """Submit a request with that id, or note its refusal."""
        try:
            asked = request(name, model, tenant, rows, **fields)
            self.streams[name] = self.dataplane.infer(asked)
        except InferenceError as error:
            self.refused.append(error.message)

    def call(self, name: str) -> None:
        """Have another model make a request of the tenant `wide`."""
        self.streams[name] = self.models[0].call(request(name, 0, "wide"))

    def answer(self, name: str, answer: InferResponse | InferenceError) -> None:
        """End the execution of a request with this answer."""
        for instance in self.instances:
            reader = instance.begun.pop(name, None)
            if reader is not None:
                reader.take(answer)
                reader.over(None)

    def end_early(self, name: str, answer: InferResponse, error: InferenceError | None) -> None:
        """End a request by its answer, or after it by an error, long before its execution."""
        for instance in self.instances:
            instance.lasting.add(name)
            if error is None and name in instance.begun:
                instance.begun[name].take(answer)
        if error is not None:
            self.streams[name].put(replace(answer, final=False))
            self.streams[name].abandon(error)

    @property
    def executing(self) -> Sequence[str]:
        """The requests that are executed, the oldest first."""
        return [name for each in self.instances for name in each.begun]

    def state(self) -> Mapping[str, Any]:
        """All that can be read of the accounts, but the times of waits: these are real ones."""
        found: dict[str, Any] = {"refused": tuple(self.refused)}
        for number, (model, instance) in enumerate(zip(self.models, self.instances, strict=True)):
            found[f"{number} order"] = tuple(instance.order)
            for family in () if model.fair is None else model.fair.families({}):
                for each in family.samples:
                    if each.name.startswith(WAIT) and not each.name.endswith("_count"):
                        continue
                    found[f"{number} {each.name} {each.labels}"] = each.value
            found |= {f"{number} counter of {key}": value for key, value in counters(model)}
        for row in self.admission.describe(self.models):
            for kind, bucket in row["buckets"].items():
                found |= {f"{row['tenant']} {kind} {name}": bucket[name] for name in bucket}
            tenant = row["tenant"]
            found[f"{tenant} in flight"], found[f"{tenant} waits"] = (
                row["in_flight"],
                row["waiting"],
            )
            headers = self.admission.limit_headers(Caller(tenant=tenant))
            found |= {f"{tenant} {name}": value for name, value in headers.items()}
        return found


def counters(model: Model) -> Iterator[tuple[str, float]]:
    """The service of each tenant by its weight, by which the next one is chosen."""
    if isinstance(model.fair, FairScheduler):
        shares = model.fair._shares  # noqa: SLF001 - no other reader has them
        for group in (shares._weighted, shares._unweighted):  # noqa: SLF001 - likewise
            yield from ((tenant, each / UNITS) for tenant, each in group.counters.items())


def request(name: str, model: int, tenant: str, rows: int = 1, **fields: Any) -> InferRequest:
    """A request of a tenant with that id."""
    numbers = array_tensor("IN", Datatype.FP32, np.ones((rows, 1), np.float32))
    caller = Caller(tenant=tenant)
    return InferRequest(model=f"m{model}", id=name, inputs=(numbers,), caller=caller, **fields)


def answer_of(phases_ns: int, tokens: int = 0) -> InferResponse:
    """The only response of a request, with the nanoseconds of its execution."""
    usage = Usage(tokens, tokens) if tokens else None
    output = array_tensor("OUT", Datatype.FP32, np.ones((1, 1), np.float32))
    phases = Phases(infer_ns=phases_ns)
    return InferResponse(outputs=(output,), final=True, phases=phases, usage=usage)


def nearly(value: object) -> object:
    """A value, but for the rounding of a sum."""
    return pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value


class Twins:
    """The same steps of two planes, of which only the first one has allowances.

    `deadlines` are those of some requests, which all are met: of their clients' own, and held.
    """

    def __init__(
        self, serve: Serve, rooms: list[int | None], rules: Mapping[str, TenantRules] = RULES
    ) -> None:
        due = time.perf_counter_ns() + 600 * NS_PER_SECOND
        self.deadlines = None, None, Deadline(first_ns=due), first(due)
        self.planes = Plane(serve, rooms, rules), Plane(serve, rooms, rules)
        for model in self.planes[1].models:
            model.allowances = NoAllowances()

    def both(self, step: Callable[[Plane], object]) -> None:
        """Do the same with both planes."""
        for each in self.planes:
            step(each)

    def compare(self) -> None:
        """Compare all that can be read of their accounts."""
        with_allowances, without = (each.state() for each in self.planes)
        assert with_allowances.keys() == without.keys()
        assert [each for each in without if with_allowances[each] != nearly(without[each])] == []


async def infer(
    plane: Plane, name: str, model: int, tenant: str, phases_ns: int = 100, **fields: Any
) -> None:
    """Have a request executed."""
    plane.infer(name, model, tenant, **fields)
    await settle()
    plane.answer(name, answer_of(phases_ns))
    await settle()
