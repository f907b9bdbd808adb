"""Models that need the same resource, as clients meet them; errors of limits are Triton's."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.conformance.clients import Client, connect
from tests.conformance.models import NEVER_US, identity
from tests.leaving import IN_FLIGHT, PENDING
from tests.serving import Serving, series, serving, wait_until, write_model

pytestmark = pytest.mark.own_models("the rate limiter")

FLAGS = (
    *("--rate-limit=execution_count", "--rate-limit-resource=license:1"),
    *("--exit-on-error=false", "--strict-readiness=false"),
)
WIRES = ("http.aio", "grpc.aio")


def needs(count: int, shared: bool = True, name: str = "license") -> str:
    resource = f'resources {{ name: "{name}" global: {str(shared).lower()} count: {count} }}'
    return f"instance_group {{ kind: KIND_CPU rate_limiter {{ {resource} }} }}\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of each kind for each wire, one of which never answers."""
    folder = tmp_path_factory.mktemp("limited")
    batcher = "max_batch_size: 4 dynamic_batching { }\n"
    for scheduling in ("", batcher):
        kind = "batcher" if scheduling else "plain"
        dims = "1"
        stuck = identity("INT32", dims, delay_us=NEVER_US) + scheduling + needs(1)
        quick = identity("INT32", dims) + scheduling + needs(1)
        write_model(folder, f"stuck_{kind}", stuck)
        write_model(folder, f"quick_{kind}", quick)
    write_model(folder, "free", identity("INT32", "1"))
    write_model(folder, "two", identity("INT32", "1") + needs(2))
    write_model(folder, "unlisted", identity("INT32", "1") + needs(1, name="other"))
    return folder


@pytest.fixture(params=WIRES)
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    async with connect(server, request.param) as found:
        yield found


async def ask(client: Client, model: str, value: int) -> int:
    library: Any = tritonclient.http if client.over_http else tritonclient.grpc
    shape = [1, 1] if "batcher" in model else [1]
    tensor = library.InferInput("INPUT", shape, "INT32")
    tensor.set_data_from_numpy(np.full(shape, value, dtype=np.int32))
    found = await client.call("infer", model, [tensor])
    return int(found.as_numpy("OUTPUT").reshape(-1)[0])


async def reached(server: Serving, model: str, in_flight: int, pending: int) -> None:
    def is_so() -> bool:
        page = server.metrics()
        found = page[series(IN_FLIGHT, model)], page[series(PENDING, model)]
        return found == (in_flight, pending)

    what = f"{model} has {in_flight} in flight and {pending} pending"
    await asyncio.to_thread(wait_until, is_so, what)


@pytest.mark.parametrize("kind", ["plain", "batcher"])
async def test_a_model_waits_for_the_resource_that_another_holds(
    server: Serving, client: Client, kind: str
) -> None:
    holding = asyncio.create_task(ask(client, f"stuck_{kind}", 0))
    await reached(server, f"stuck_{kind}", in_flight=1, pending=0)
    waiting = asyncio.create_task(ask(client, f"quick_{kind}", 7))
    await reached(server, f"quick_{kind}", in_flight=1, pending=1)
    assert await ask(client, "free", 5) == 5
    assert not waiting.done()
    holding.cancel()
    assert await waiting == 7
    await reached(server, f"stuck_{kind}", in_flight=0, pending=0)


async def test_a_request_cancelled_while_it_waits_is_never_executed(
    server: Serving, client: Client
) -> None:
    executed = series("nv_inference_exec_count", "quick_plain")
    before = server.metrics()[executed]
    holding = asyncio.create_task(ask(client, "stuck_plain", 0))
    await reached(server, "stuck_plain", in_flight=1, pending=0)
    waiting = asyncio.create_task(ask(client, "quick_plain", 1))
    await reached(server, "quick_plain", in_flight=1, pending=1)
    waiting.cancel()
    await reached(server, "quick_plain", in_flight=0, pending=0)
    holding.cancel()
    await reached(server, "stuck_plain", in_flight=0, pending=0)
    assert server.metrics()[executed] == before
    assert await ask(client, "quick_plain", 2) == 2


async def test_a_model_that_could_never_execute_is_not_loaded(client: Client) -> None:
    found = await client.call("get_model_repository_index")
    rows = (
        {each["name"]: each.get("reason", "") for each in found}
        if client.over_http
        else {each.name: each.reason for each in found.models}
    )
    too_little = (
        'Invalid argument: Resource count for "{}" is limited to {} which will prevent scheduling '
        "of one or more model instances, the minimum required count is {}"
    )
    assert rows["two"] == too_little.format("license", 1, 2)
    assert rows["unlisted"] == too_little.format("other", 0, 1)


@contextmanager
def started(tmp_path: Path, *flags: str) -> Iterator[Serving]:
    with serving(tmp_path, "--exit-on-error=false", "--strict-readiness=false", *flags) as server:
        yield server


@pytest.mark.parametrize("limited", [True, False])
async def test_a_resource_is_shared_or_of_devices_and_off_nothing_matters(
    tmp_path: Path, limited: bool
) -> None:
    write_model(tmp_path, "one", identity("INT32", "1") + needs(1, shared=False))
    write_model(tmp_path, "other", identity("INT32", "1") + needs(1))
    flags = ("--rate-limit=execution_count",) if limited else ("--rate-limit-resource=license:0",)
    with started(tmp_path, *flags, "--model-load-thread-count=1") as server:
        async with connect(server, "http.aio") as client:
            found = await client.call("get_model_repository_index")
            reasons = {each["name"]: each.get("reason", "") for each in found}
    conflict = (
        'Invalid argument: Resource "license" is present as both global and device-specific '
        "resource in the model configuration."
    )
    assert sorted(reasons.values()) == (["", conflict] if limited else ["", ""])
