"""Allowances that end early by what requests of other tenants do."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from gateway.backend import Answer
from gateway.config.scheduling import DynamicBatching
from gateway.messages import InferRequest
from gateway.policy.tenants import TenantRules
from tests.builders import settle, soon
from tests.conftest import Serve
from tests.gateway.admission import twin_planes
from tests.gateway.admission.twin_planes import NUMBERS, Plane, Twins, answer_of, infer


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize("limits", [{"requests_per_minute": 1e9}, {"compute_ms_per_minute": 1e9}])
async def test_slow_executions_of_one_tenant_end_what_another_may_begin_by_a_lower_mean(
    serve: Serve, limits: dict[str, float], *, is_noted: bool
) -> None:
    """A request of the other one needs the mean compute time, which its bucket has no more."""
    rules = {"a": TenantRules(compute_ms_per_minute=10.0), "slow": TenantRules(**limits)}
    twins, passed = Twins(serve, [None], rules), []
    await settle()
    for plane in twins.planes:
        for number in range(3):
            await infer(plane, f"a{number}", 0, "a", phases_ns=1000)
            if is_noted:
                await infer(plane, f"s{number}", 0, "slow", phases_ns=1000)
    twins.both(lambda plane: plane.infer("long", 0, "slow"))
    for plane in twins.planes:
        await infer(plane, "meanwhile", 0, "a", phases_ns=1000)
    await asyncio.sleep(0.06)
    twins.both(lambda plane: plane.answer("long", answer_of(60_000_000)))
    for plane in twins.planes:
        before = len(plane.refused)
        for number in range(60):
            plane.infer(f"{number}", 0, "a")
        passed.append(60 - len(plane.refused) + before)
        for name in plane.executing:
            plane.answer(name, answer_of(1000))
    await settle()
    assert passed == [0, 0]
    twins.compare()


class BatchedInstance(twin_planes.HeldInstance):
    """Executes batches once they are `released`."""

    def __init__(self, concurrency: int | None) -> None:
        super().__init__(concurrency)
        self.singles = None  # type: ignore[assignment]  # it executes batches only
        self.released = asyncio.Event()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        await self.released.wait()
        for number in range(len(requests)):
            yield number, answer_of(100)


def hold(plane: Plane) -> None:
    """Have executions wait from now on."""
    for each in plane.instances:
        assert isinstance(each, BatchedInstance)
        each.released.clear()


async def drain(plane: Plane) -> None:
    """Have all requests executed."""
    for each in plane.instances:
        assert isinstance(each, BatchedInstance)
        each.released.set()
    await soon(plane.models[0].requests.drained())
    await settle()


async def test_a_request_with_more_rows_than_its_tenant_has_left_ends_what_others_may_begin(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the last one that begins without a look, and takes the places of the others."""
    rows = 64
    config = replace(NUMBERS, max_batch_size=rows, dynamic_batching=DynamicBatching())
    monkeypatch.setattr(twin_planes, "HeldInstance", BatchedInstance)
    monkeypatch.setattr(twin_planes, "NUMBERS", config)
    twins = Twins(serve, [1], {name: TenantRules(requests_per_minute=1e9) for name in "ab"})
    await settle()
    for name in ("a1", "b1", "a2", "b2", "a3", "b3"):
        for plane in twins.planes:
            plane.infer(name, 0, name[0])
            await drain(plane)
    twins.both(hold)
    for plane in twins.planes:
        plane.infer("a4", 0, "a")
        plane.infer("b4", 0, "b")
    allowances = twins.planes[0].models[0].allowances
    count = min(each.passage.left for each in allowances.values()) - 1
    assert count > rows / 2
    for plane in twins.planes:
        for tenant in "ab":
            for number in range(count):
                plane.infer(f"{tenant} {number}", 0, tenant)
            plane.infer(f"{tenant} last", 0, tenant, rows)
    await settle()
    assert twins.planes[1].state()["b waits"] > 0
    twins.compare()
    for plane in twins.planes:
        await drain(plane)
    twins.compare()


async def test_rows_take_one_place_without_a_batcher(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin_planes, "NUMBERS", replace(NUMBERS, max_batch_size=128))
    plane = Plane(serve, [None], {"a": TenantRules(requests_per_minute=1e9)})
    await settle()
    for number in range(3):
        await infer(plane, f"{number}", 0, "a")
    (allowance,) = plane.models[0].allowances.values()
    before = allowance.passage.left
    plane.infer("wide", 0, "a", 65)
    assert allowance.passage.left == before - 1
    plane.answer("wide", answer_of(100))
    await settle()
