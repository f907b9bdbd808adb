"""A flood of one tenant and a request of another one, over both wires."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from gateway.in_process.server import Server
from gateway.policy.keys import Role, new_key
from tests.conformance.keys import bearer, stored, write
from tests.conformance.models import identity
from tests.rpc import connected, infer_request
from tests.serving import WAIT_SECS, wait_until, write_model

FLOOD = 60
"""Requests that the flood has in flight at once."""
BEFORE = FLOOD // 6
"""Answers of the flood that may come first: four on an idle machine; first in, first out 45."""
KEYS = {name: new_key() for name in ("flood", "quiet", "admin")}
BODY = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1], "data": [1]}]}
PATH = "/v2/models/slow/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("floods")
    write_model(folder / "models", "slow", identity("INT32", delay_us=20_000, concurrency=1))
    roles = {"admin": frozenset(Role)}
    infer = frozenset({Role.INFER})
    texts = [stored(key, name, roles=roles.get(name, infer)) for name, key in KEYS.items()]
    write(folder / "keys.toml", "[tenants.flood]\nweight = 1.0", *texts)
    wires = ("http", "grpc")
    options = {f"{name}_port": 0 for name in wires}
    addresses = {f"{name}_address": "127.0.0.1" for name in wires}
    with Server(
        model_repository=folder / "models", api_keys=folder / "keys.toml", **options, **addresses
    ) as found:
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


def in_flight(server: Server) -> int:
    url = f"http://127.0.0.1:{server.ports['http']}/admin/tenants"
    tenants = httpx.get(url, headers=bearer(KEYS["admin"][0])).json()["tenants"]
    return next((each["in_flight"] for each in tenants if each["tenant"] == "flood"), 0)


@pytest.mark.parametrize("ask", [post, call])
def test_a_flood_of_one_tenant_delays_no_request_of_another(
    server: Server, ask: Callable[[Server, str], int]
) -> None:
    ended: list[int] = []
    with ThreadPoolExecutor(FLOOD) as clients:
        flood = [
            clients.submit(lambda: ended.append(ask(server, "flood"))) for _ in range(2 * FLOOD)
        ]
        wait_until(lambda: in_flight(server) >= FLOOD * 3 // 4, "the flood is in flight")
        before = len(ended)
        assert ask(server, "quiet") == 200
        assert len(ended) - before <= BEFORE
        for each in flood:
            each.result()
    assert ended == [200] * (2 * FLOOD)
