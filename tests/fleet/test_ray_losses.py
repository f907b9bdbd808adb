"""Parts of a Ray cluster that are killed under 50 streams; each text is that of a calm run."""

from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests.conformance.models import with_parameters
from tests.fleet.nodes import (
    LOST_SECS,
    ONE_ON_A_NODE,
    Fleet,
    RayNodes,
    client_of_two,
    in_flight,
    kill,
    parent,
)
from tests.serving import Serving, running, wait_until, write_model
from tests.stories import CONTINUING, FEW_TOKENS, STREAMS, check_whole, tell
from tests.telling import TELLING

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet(nodes: RayNodes) -> Fleet:
    return Fleet("losing", nodes.address)


@pytest.fixture(scope="module")
def router(
    nodes: RayNodes, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A router of two replicas, each on a node of its own."""
    nodes.add("b")
    models = tmp_path_factory.mktemp("losing") / "models"
    write_model(models, "story", TELLING + with_parameters({**CONTINUING, **ONE_ON_A_NODE}))
    flags = ("--fleet=ray", f"--fleet-name={fleet.name}")
    with running(Serving(models, flags, fleet.environment)) as found:
        yield found
        fleet.command("down")
    assert "Traceback" not in found.text


@pytest.fixture
def http(router: Serving) -> Iterator[httpx.Client]:
    """A client of the router, once that is connected to both replicas."""
    with client_of_two(router) as found:
        yield found


def busier(http: httpx.Client, fleet: Fleet) -> int:
    """The process of the replica with more requests than the other, or as many."""
    found = in_flight(http)
    port = max(found, key=lambda each: found[each])
    for pid in fleet.replicas("story"):
        sockets = psutil.Process(pid).net_connections("tcp")
        if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets):
            return pid
    raise AssertionError(f"no replica listens at {port}")


async def continued(router: Serving, disturb: Callable[[], object]) -> int:
    """The continued ones of many texts under a disturbance; all of them are whole."""
    return check_whole(await tell(router, STREAMS, disturb, FEW_TOKENS))


async def test_texts_of_a_killed_replica_actor_are_continued(
    http: httpx.Client, router: Serving, fleet: Fleet
) -> None:
    assert await continued(router, lambda: kill(parent(busier(http, fleet)))) > 0


async def test_texts_of_a_killed_node_are_continued_at_another(
    http: httpx.Client, router: Serving, fleet: Fleet, nodes: RayNodes
) -> None:
    lost: list[str] = []

    def kill_node() -> None:
        lost.append(nodes.zone(busier(http, fleet)))
        nodes.kill(*lost)

    try:
        assert await continued(router, kill_node) > 0
    finally:
        nodes.add(*lost)


async def test_texts_have_no_break_without_the_controller(
    http: httpx.Client, router: Serving, fleet: Fleet, nodes: RayNodes
) -> None:
    before = fleet.replicas("story")
    (controller,) = nodes.workers("ControllerActor")
    assert await continued(router, lambda: kill(controller)) == 0
    wait_until(lambda: nodes.workers("ControllerActor") != [], "it is back", LOST_SECS)
    assert sorted(fleet.replicas("story")) == sorted(before)


async def test_texts_have_no_break_without_the_state_of_the_cluster(
    http: httpx.Client, router: Serving, fleet: Fleet, nodes: RayNodes
) -> None:
    before = fleet.replicas("story")
    assert await continued(router, nodes.kill_gcs) == 0
    nodes.start_gcs()
    wait_until(lambda: "READY" in fleet.command("status").stdout, "it has a status", LOST_SECS)
    assert sorted(fleet.replicas("story")) == sorted(before)


async def test_texts_have_no_break_without_the_head(
    http: httpx.Client, router: Serving, fleet: Fleet, nodes: RayNodes
) -> None:
    before = fleet.replicas("story")
    assert await continued(router, nodes.kill_head) == 0
    assert await continued(router, lambda: None) == 0
    nodes.start_head()
    wait_until(lambda: "READY" in fleet.command("status").stdout, "it has a status", LOST_SECS)
    assert sorted(fleet.replicas("story")) == sorted(before)
