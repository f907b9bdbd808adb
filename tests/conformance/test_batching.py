"""Batches, full queues and timeouts as clients meet them; a real Triton gave the same answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.conformance.clients import Client, connect
from tests.conformance.models import HOLD, NEVER_US, identity
from tests.leaving import FAILURES, reached
from tests.serving import Serving, held, series, write_model

pytestmark = pytest.mark.own_models("the queue")

WIRES = ("http.aio", "grpc.aio")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind for each wire, so that no test sees the statistics of another."""
    folder = tmp_path_factory.mktemp("batching")
    for wire in WIRES:
        slow = identity("INT32", "1", **HOLD)
        stuck = identity("INT32", "1", delay_us=NEVER_US)
        for name, config in {
            "preferred": slow + "max_batch_size: 8 dynamic_batching { preferred_batch_size: [4] }",
            "levels": slow + "max_batch_size: 1 dynamic_batching "
            "{ priority_levels: 2 default_priority_level: 2 }",
            "full": stuck + "max_batch_size: 1 dynamic_batching "
            "{ default_queue_policy { max_queue_size: 2 } }",
            "timed": stuck + "max_batch_size: 1 dynamic_batching { default_queue_policy "
            "{ default_timeout_microseconds: 60000000 allow_timeout_override: true } }",
        }.items():
            write_model(folder, f"{name}_{wire}", config)
    return folder


@pytest.fixture(params=WIRES)
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    async with connect(server, request.param) as found:
        yield found


def number(client: Client, value: int) -> list[Any]:
    library: Any = tritonclient.http if client.over_http else tritonclient.grpc
    tensor = library.InferInput("INPUT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], dtype=np.int32))
    return [tensor]


async def ask(client: Client, model: str, value: int, **options: Any) -> int:
    found = await client.call("infer", model, number(client, value), **options)
    return int(found.as_numpy("OUTPUT")[0, 0])


async def busy(server: Serving, client: Client, model: str) -> "asyncio.Task[int]":
    """A request that the model's only instance is executing."""
    task = asyncio.create_task(ask(client, model, 0))
    await reached(server, model, in_flight=1, pending=0)
    return task


@asynccontextmanager
async def leaving(
    server: Serving, client: Client, model: str
) -> AsyncIterator["list[asyncio.Task[int]]"]:
    """In this block the model's instance is busy; at its end all added requests are cancelled."""
    tasks = [await busy(server, client, model)]
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await reached(server, model, in_flight=0, pending=0)


async def test_a_backlog_of_seven_with_a_preferred_size_of_four(
    server: Serving, repository: Path, client: Client
) -> None:
    model = f"preferred_{client.wire}"
    with held(repository, model):
        first = await busy(server, client, model)
        backlog = [asyncio.create_task(ask(client, model, value)) for value in range(1, 8)]
        await reached(server, model, in_flight=8, pending=7)
    assert [await each for each in (first, *backlog)] == list(range(8))
    (row,) = (await client.statistics(model)).model_stats
    assert {each.batch_size: each.compute_infer.count for each in row.batch_stats} == {
        1: 1,
        4: 1,
        3: 1,
    }
    assert (row.execution_count, row.inference_count) == (3, 8)


async def test_a_full_queue_refuses_and_counts_nothing(server: Serving, client: Client) -> None:
    model = f"full_{client.wire}"
    async with leaving(server, client, model) as tasks:
        tasks += [asyncio.create_task(ask(client, model, value)) for value in (1, 2)]
        await reached(server, model, in_flight=3, pending=2)
        refusal = await client.refusal("infer", model, number(client, 3), request_id="r2")
        page = server.metrics()
    assert refusal == (client.code("UNAVAILABLE"), "[request id: r2] Exceeds maximum queue size")
    assert page[series(FAILURES, model, reason="REJECTED")] == 0
    assert page[series(FAILURES, model, reason="OTHER")] == 0


async def test_a_timeout_in_the_queue_is_answered_as_rejected(
    server: Serving, client: Client
) -> None:
    model = f"timed_{client.wire}"
    async with leaving(server, client, model):
        refusal = await client.refusal("infer", model, number(client, 1), timeout=1000)
    assert refusal == (client.code("UNAVAILABLE"), "Request timeout expired")
    assert server.metrics()[series(FAILURES, model, reason="REJECTED")] == 1


async def test_the_more_urgent_request_goes_first(
    server: Serving, repository: Path, client: Client
) -> None:
    model = f"levels_{client.wire}"
    ended: list[int] = []

    async def note(value: int, priority: int) -> None:
        ended.append(await ask(client, model, value, priority=priority))

    async with asyncio.TaskGroup() as tasks:
        with held(repository, model):
            first = await busy(server, client, model)
            tasks.create_task(note(1, priority=2))
            await reached(server, model, in_flight=2, pending=1)
            tasks.create_task(note(2, priority=1))
            await reached(server, model, in_flight=3, pending=2)
    assert await first == 0
    assert ended == [2, 1]
