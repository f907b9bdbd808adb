"""Tenants of a key file share the models of a server, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.in_process.server import Server
from gateway.policy import api_keys
from gateway.policy.keys import Role, new_key
from gateway.policy.tenants import LEAST, MOST
from tests.builders import WAIT_SECS, soon
from tests.conformance.keys import bearer, stored, write
from tests.conformance.models import HOLD, identity
from tests.serving import held, series, write_model

KEYS = {name: new_key() for name in ("a", "b", "c")}
LISTED = "\n".join(stored(key, name, roles=frozenset(Role)) for name, key in KEYS.items())
SERVICE = "gateway_tenant_service_total"
WAITING = "gateway_tenant_waiting"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.toml"
    write(file, LISTED)
    return file


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A model of one request at a time, which can be held."""
    write_model(tmp_path / "models", "one", identity("BYTES", "1", **HOLD))
    return tmp_path / "models"


@pytest.fixture
async def client(
    key_file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that looks at its key file often."""
    monkeypatch.setattr(api_keys, "LOOK_SECS", 0.01)
    address = "127.0.0.1"
    async with (
        Server(
            model_repository=str(models),
            api_keys=str(key_file),
            allow_http=True,
            http_address=address,
            http_port=0,
            allow_metrics=True,
            metrics_address=address,
            metrics_port=0,
        ) as server,
        httpx.AsyncClient(timeout=WAIT_SECS) as client,
    ):
        client.base_url = httpx.URL(f"http://{address}:{server.ports['http']}")
        client.headers["x-metrics"] = f"http://{address}:{server.ports['metrics']}/metrics"
        yield client


async def infer(client: httpx.AsyncClient, tenant: str, text: str, done: list[str]) -> None:
    body: dict[str, Any] = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": [text]}
    answer = await client.post(
        "/v2/models/one/infer", json={"inputs": [body]}, headers=bearer(KEYS[tenant][0])
    )
    assert answer.json()["outputs"][0]["data"] == [text]
    done.append(text)


async def metric(client: httpx.AsyncClient, name: str, **labels: str) -> float | None:
    """The value of a sample; None if it is not on the page."""
    page = await client.get(client.headers["x-metrics"], headers=bearer(KEYS["a"][0]))
    found = [
        line for line in page.text.splitlines() if line.startswith(series(name, "one", **labels))
    ]
    return float(found[0].rpartition(" ")[2]) if found else None


async def until(client: httpx.AsyncClient, value: float | None, name: str, **labels: str) -> None:
    async with asyncio.timeout(WAIT_SECS):
        while await metric(client, name, **labels) != value:  # noqa: ASYNC110 - a request each
            await asyncio.sleep(0.01)


async def test_a_table_in_the_key_file_makes_shares_at_once_and_its_removal_ends_them(
    client: httpx.AsyncClient, models: Path, key_file: Path
) -> None:
    done: list[str] = []
    await infer(client, "a", "before", done)
    assert await metric(client, SERVICE, tenant="other", kind="compute_ms") is None
    write(key_file, "[tenants.a]\nweight = 0\n", LISTED)
    async with asyncio.timeout(WAIT_SECS):
        while await metric(client, SERVICE, tenant="a", kind="compute_ms") is None:
            await infer(client, "a", "counted", done)
    done.clear()
    with held(models, "one"):
        tasks = [asyncio.create_task(infer(client, "a", "1", done))]
        await until(client, 1, "gateway_tenant_in_flight", tenant="a")
        for number in "234":
            tasks.append(asyncio.create_task(infer(client, "a", number, done)))
            await until(client, int(number), "gateway_tenant_in_flight", tenant="a")
        await until(client, 2, WAITING, tenant="a")
        tasks.append(asyncio.create_task(infer(client, "b", "mine", done)))
        await until(client, 1, WAITING, tenant="other")
    await soon(asyncio.gather(*tasks))
    assert done == ["1", "2", "mine", "3", "4"]
    write(key_file, LISTED)
    counted = None
    async with asyncio.timeout(WAIT_SECS):
        while counted != (counted := await metric(client, "gateway_queue_wait_seconds_count")):
            await infer(client, "a", "after", done)


async def test_the_largest_and_the_smallest_weight_order_requests_and_starve_none(
    client: httpx.AsyncClient, models: Path, key_file: Path
) -> None:
    weights = {"a": MOST, "b": LEAST, "c": MOST}
    write(
        key_file, *(f"[tenants.{name}]\nweight = {each}" for name, each in weights.items()), LISTED
    )
    done: list[str] = []
    async with asyncio.timeout(WAIT_SECS):
        while await metric(client, SERVICE, tenant="b", kind="compute_ms") is None:
            await infer(client, "b", "counted", done)
    for _ in range(2):  # the second time the tenants have counters
        done.clear()
        with held(models, "one"):
            tasks = []
            asked = {"a": "123456", "b": "pq", "c": "xyz"}
            for tenant, texts in asked.items():
                for number, text in enumerate(texts, 1):
                    tasks.append(asyncio.create_task(infer(client, tenant, text, done)))
                    await until(client, number, "gateway_tenant_in_flight", tenant=tenant)
        await soon(asyncio.gather(*tasks))
        found = "".join(done)
        assert sorted(found) == sorted("123456pqxyz")
        assert found.startswith("12"), "they were released before the others came"
        assert found.index("z") < found.index("6"), "a has had the time in which it was held"
        assert found.endswith("q"), "p has cost b more than all others have"
