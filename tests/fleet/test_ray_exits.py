"""The processes that Ray's library ends while the state of the cluster is gone, and all others.

It ends a process that has not reached the state for a time: here that is short for the child
process of the router and for one of two nodes, and Ray's usual minute for the rest.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import httpx
import psutil
import pytest

from tests.conformance.models import with_parameters
from tests.fleet.nodes import LOST_SECS, ONE_ON_A_NODE, Fleet, RayNodes, client_of_two, in_flight
from tests.serving import WAIT_SECS, Serving, running, wait_until, write_model
from tests.stories import CONTINUING, DELAY_US, FEW_TOKENS, Story, check_whole
from tests.telling import TELLING

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SHORT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
ON_TWO_NODES = {**ONE_ON_A_NODE, "replica_labels": '{"zone": "in(a, short)"}'}
GONE_SECS = 30.0
"""Within Ray's minute; the processes end after 3 s, and the seconds between two looks at them."""
TOKENS = int(GONE_SECS * 1e6 / DELAY_US)
STREAMS = 10


@pytest.fixture(scope="module")
def fleet(nodes: RayNodes) -> Fleet:
    return Fleet("exits", nodes.address)


@pytest.fixture(scope="module")
def router(
    nodes: RayNodes, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A router of two replicas, of which one is on the node that ends early."""
    nodes.add("short", SHORT)
    models = tmp_path_factory.mktemp("exits") / "models"
    write_model(models, "story", TELLING + with_parameters({**CONTINUING, **ON_TWO_NODES}))
    flags = ("--fleet=ray", f"--fleet-name={fleet.name}")
    with running(Serving(models, flags, {**fleet.environment, **SHORT})) as found:
        yield found
        fleet.command("down")
    nodes.kill("short")
    assert "Traceback" not in found.text


@pytest.fixture
def http(router: Serving) -> Iterator[httpx.Client]:
    with client_of_two(router) as found:
        yield found


def drivers(router: Serving) -> Sequence[psutil.Process]:
    """The child processes of a router that are drivers of Ray."""
    children = psutil.Process(router.process.pid).children()
    return [each for each in children if "gateway.fleet.ray_directory" in each.cmdline()]


def loads_ray(process: psutil.Process) -> bool:
    """Whether a process has Ray's library."""
    return any("_raylet" in each.path for each in process.memory_maps())


async def told_while(
    router: Serving, tokens: int, disturb: Callable[[], object]
) -> Sequence[Story]:
    """Texts whose streams run while something happens in another thread."""
    stories = [Story(number, tokens) for number in range(STREAMS)]
    limits = httpx.Limits(max_connections=STREAMS)
    async with (
        httpx.AsyncClient(base_url=router.http, timeout=WAIT_SECS, limits=limits) as client,
        asyncio.timeout(2 * GONE_SECS + WAIT_SECS),
    ):
        reading = [asyncio.ensure_future(each.read(client)) for each in stories]
        for each in stories:
            await each.has_begun.wait()
        await asyncio.to_thread(disturb)
        await asyncio.gather(*reading)
    return stories


async def test_texts_continue_when_ray_ends_the_processes_that_miss_the_state_of_the_cluster(
    http: httpx.Client, router: Serving, fleet: Fleet, nodes: RayNodes
) -> None:
    by_zone = {nodes.zone(pid): pid for pid in fleet.replicas("story")}
    (driver,) = drivers(router)
    staying, running_on = by_zone["a"], 0
    assert loads_ray(driver)
    others = map(psutil.Process, (router.process.pid, *by_zone.values()))
    assert not any(map(loads_ray, others))

    def lose_state() -> None:
        nonlocal running_on
        nodes.kill_gcs()
        wait_until(lambda: not driver.is_running(), "Ray ends the driver", GONE_SECS)
        wait_until(lambda: not nodes.is_running("short"), "Ray ends the node", GONE_SECS)
        wait_until(lambda: fleet.replicas("story") == [staying], "its replica ends", GONE_SECS)
        running_on = sum(in_flight(http).values())

    try:
        continued = check_whole(await told_while(router, TOKENS, lose_state))
        assert 0 < continued < STREAMS
        assert running_on == STREAMS
        assert check_whole(await told_while(router, FEW_TOKENS, lambda: None)) == 0
    finally:
        nodes.start_gcs()
    wait_until(lambda: "READY" in fleet.command("status").stdout, "it has a status", LOST_SECS)
    wait_until(lambda: any(map(loads_ray, drivers(router))), "the router has a driver", LOST_SECS)
    assert check_whole(await told_while(router, FEW_TOKENS, lambda: None)) == 0
    assert fleet.replicas("story") == [staying]
