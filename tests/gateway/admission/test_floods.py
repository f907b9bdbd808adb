"""A flood of one tenant and a request of another one, over both wires."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gateway.in_process.server import Server
from gateway.policy.keys import Role, new_key
from tests.conformance.keys import bearer, stored, write
from tests.conformance.models import HOLD, identity
from tests.gateway.in_process.conftest import in_flight
from tests.rpc import connected, infer_request
from tests.serving import WAIT_SECS, held, wait_until, write_model

FLOOD = 60
"""Requests that the flood has in flight at once."""
BEFORE = FLOOD // 6
"""Answers of the flood that may come first: three on an idle machine; first in, first out all."""
KEYS = {name: new_key() for name in ("flood", "quiet")}
BODY = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1], "data": [1]}]}
PATH = "/v2/models/slow/infer"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floods") / "models"
    write_model(folder, "slow", identity("INT32", delay_us=20_000, concurrency=1, **HOLD))
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    file = models.parent / "keys.toml"
    infer = frozenset({Role.INFER})
    texts = [stored(key, name, roles=infer) for name, key in KEYS.items()]
    write(file, "[tenants.flood]\nweight = 1.0", *texts)
    wires = ("http", "grpc")
    options = {f"{name}_port": 0 for name in wires}
    addresses = {f"{name}_address": "127.0.0.1" for name in wires}
    with Server(model_repository=models, api_keys=file, **options, **addresses) as found:
        yield found


def post(server: Server, tenant: str) -> int:
    url = f"http://127.0.0.1:{server.ports['http']}{PATH}"
    headers = bearer(KEYS[tenant][0])
    return httpx.post(url, json=BODY, headers=headers, timeout=WAIT_SECS).status_code


def call(server: Server, tenant: str) -> int:
    metadata = [("x-api-key", KEYS[tenant][0])]
    with connected(f"127.0.0.1:{server.ports['grpc']}") as stub:
        asked = infer_request("slow", INPUT=1)
        stub.ModelInfer(asked, metadata=metadata, timeout=WAIT_SECS)
        return 200


@pytest.mark.parametrize("ask", [post, call])
def test_a_flood_of_one_tenant_delays_no_request_of_another(
    server: Server, models: Path, ask: Callable[[Server, str], int]
) -> None:
    ended: list[int] = []
    with ThreadPoolExecutor(FLOOD) as clients, ThreadPoolExecutor(1) as beside:
        with held(models, "slow"):
            flood = [
                clients.submit(lambda: ended.append(ask(server, "flood"))) for _ in range(2 * FLOOD)
            ]
            wait_until(
                lambda: in_flight(server.metrics(), "slow") == FLOOD, "the flood is in flight"
            )
            quiet = beside.submit(ask, server, "quiet")
            wait_until(
                lambda: in_flight(server.metrics(), "slow") == FLOOD + 1, "the request is behind it"
            )
            assert ended == []
        assert quiet.result() == 200
        assert len(ended) <= BEFORE
        for each in flood:
            each.result()
    assert ended == [200] * (2 * FLOOD)
