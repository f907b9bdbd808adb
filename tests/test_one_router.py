"""The two routers of `--fleet`: which of them a test asks."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.conformance.models import identity
from tests.fork_server import ROOT
from tests.one_router import ONE_ROUTER
from tests.routed import AnyRouter
from tests.serving import FLEET, ROUTERS, serving, write_model

READS = 20


@pytest.fixture
def fleet() -> Iterator[None]:
    """Servers of the test are two routers of one replica."""
    before = FLEET[:], ROUTERS[:]
    FLEET[:] = [1]
    yield
    FLEET[:], ROUTERS[:] = before


@pytest.mark.parametrize("entry", ONE_ROUTER)
def test_each_entry_of_the_table_is_a_module_or_a_test(entry: str) -> None:
    module, _, name = entry.partition("::")
    text = (ROOT / "tests" / module).read_text()
    assert not name or f"def {name}(" in text


@pytest.mark.usefixtures("fleet")
def test_requests_go_to_any_router_and_those_of_the_table_to_the_first(tmp_path: Path) -> None:
    write_model(tmp_path, "echo", identity("FP32", "1"))
    path = "/v2/models/echo/infer"
    one = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [1]}]}
    with serving(tmp_path) as server:
        every = {each.own_ports["http"] for each in (server, *server.others)}
        ROUTERS[:] = [Random(0)]
        assert {server.ports["http"] for _ in range(READS)} == every
        with httpx.Client(base_url=server.http, transport=AnyRouter(server)) as client:
            answers = [client.post(path, json=one) for _ in range(READS)]
        assert {each.status_code for each in answers} == {200}
        assert {each.url.port for each in answers} == every
        counts = [each.metric("nv_inference_request_success", "echo") for each in server.others]
        assert 0 < sum(counts) < READS
        assert server.metric("nv_inference_request_success", "echo") == READS
        ROUTERS.clear()
        assert {server.ports["http"] for _ in range(READS)} == {server.own_ports["http"]}
    assert len(every) == 2
