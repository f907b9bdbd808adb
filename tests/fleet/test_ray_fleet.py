"""A fleet on Ray: `sluice serve --fleet ray`, and its end by `sluice fleet down`.

One fleet serves all tests, and its end is checked after them: processes of Ray take seconds.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conformance.models import REPEAT, with_parameters
from tests.fleet.nodes import LOST_SECS, Fleet, RayNodes, kill
from tests.serving import WAIT_SECS, Serving, running, wait_until, write_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STREAMS = 20
STREAM = "/v2/models/repeat/generate_stream"
READY = "/v2/models/repeat/ready"
SMALL = {"replica_resources": '{"CPU": 0.25}'}
PLAN = '{"steps": [{"weight": 50, "pause": true}]}'
NOWHERE = {"replica_resources": '{"GPU": 8}', "replica_labels": '{"zone": "a"}'}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "models"
    write_model(folder, "repeat", REPEAT + with_parameters(SMALL))
    (folder / "repeat" / "rollout.json").write_text(PLAN)
    write_model(folder, "nowhere", REPEAT + with_parameters(NOWHERE))
    return folder


@pytest.fixture(scope="module")
def fleet(nodes: RayNodes) -> Fleet:
    return Fleet("tested", nodes.address)


@pytest.fixture(scope="module")
def router(models: Path, fleet: Fleet) -> Iterator[Serving]:
    flags = ("--fleet=ray", f"--fleet-name={fleet.name}")
    with running(Serving(models, flags, fleet.environment)) as found:
        yield found
        ended = fleet.command("down")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"fleet '{fleet.name}' ended, with 2 replicas" in ended.stdout
        assert fleet.replicas("repeat") == []
        assert "with 0 replicas" in fleet.command("down").stdout
    assert found.process.returncode == 0, found.log[-50:]
    assert "Traceback" not in found.text
    lacking = fleet.command("status")
    assert lacking.returncode == 1
    assert f"fleet '{fleet.name}' has no controller" in lacking.stderr


@pytest.fixture
def http(router: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.http, timeout=WAIT_SECS) as found:
        wait_until(lambda: found.get(READY).is_success, "a replica is ready", LOST_SECS)
        yield found


def streamed(http: httpx.Client, responses: int, delay_us: int = 0) -> int:
    """The responses that a stream has brought; it has no error."""
    body = {"text_input": "x", "n": responses, "delay_us": delay_us}
    with http.stream("POST", STREAM, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    assert not any('"error"' in line for line in lines), lines
    return len(lines)


def test_a_stream_passes_the_router_and_the_fleet_has_a_status(
    http: httpx.Client, fleet: Fleet, router: Serving
) -> None:
    assert streamed(http, 500) == 500
    found = fleet.command("status")
    assert (found.returncode, found.stderr) == (0, "")
    assert "READY" in found.stdout
    assert "INFEASIBLE" in found.stdout
    reason = "no node has 8 GPU with zone=a"
    assert f"nowhere: {reason}" in found.stdout
    router.wait_logged(reason)


def test_a_fleet_is_served_and_shown_with_the_token_of_its_cluster_only(
    http: httpx.Client, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert streamed(http, 5) == 5
    assert "READY" in fleet.command("status").stdout
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another" * 8)
    with fleet.begun("status") as refused:
        assert refused.stderr is not None
        assert any("InvalidAuthToken" in line for line in refused.stderr)


def test_a_missing_token_of_the_cluster_is_named(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    found = fleet.command("status")
    assert found.returncode == 1
    assert "Ray cannot be used" in found.stderr
    assert "token" in found.stderr


def test_a_replica_without_gpus_sees_none(http: httpx.Client, fleet: Fleet) -> None:
    (pid,) = fleet.replicas("repeat")
    assert b"\0CUDA_VISIBLE_DEVICES=\0" in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_replica_has_the_zone_of_its_node(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes
) -> None:
    (pid,) = fleet.replicas("repeat")
    zone = f"\0--fleet-zone={nodes.zone(pid)}\0".encode()
    assert zone in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_replica_that_is_killed_is_replaced(http: httpx.Client, fleet: Fleet) -> None:
    (before,) = fleet.replicas("repeat")
    kill(before)
    fleet.wait_replicas("repeat", 1, without=[before])
    wait_until(lambda: http.get(READY).is_success, "another replica is ready", LOST_SECS)
    assert streamed(http, 5) == 5


def test_a_replica_ends_with_its_actor_and_is_replaced(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes
) -> None:
    (before,) = fleet.replicas("repeat")
    (actor,) = nodes.workers("ReplicaActor")
    kill(actor)
    fleet.wait_replicas("repeat", 1, without=[before])
    assert before not in fleet.replicas("repeat")
    wait_until(lambda: http.get(READY).is_success, "another replica is ready", LOST_SECS)


def test_requests_continue_without_the_controller_until_ray_restarts_it(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes
) -> None:
    before = fleet.replicas("repeat")
    (controller,) = nodes.workers("ControllerActor")
    kill(controller)
    assert streamed(http, 5) == 5
    wait_until(lambda: nodes.workers("ControllerActor") != [], "it is back", LOST_SECS)
    assert "READY" in fleet.command("status").stdout
    assert fleet.replicas("repeat") == before


def test_a_changed_model_is_replaced_under_streams_without_a_failure(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes, models: Path
) -> None:
    (before,) = fleet.replicas("repeat")
    is_over = False

    def client() -> int:
        count = 0
        while not is_over:
            assert streamed(http, 10, delay_us=100_000) == 10
            count += 1
        return count

    with ThreadPoolExecutor(STREAMS) as clients:
        ends = [clients.submit(client) for _ in range(STREAMS)]
        changed = REPEAT + with_parameters({**SMALL, "engine": "new"})
        (models / "repeat" / "config.pbtxt").write_text(changed)
        try:
            fleet.wait_replicas("repeat", 1, without=[before])
            wait_until(lambda: before not in fleet.replicas("repeat"), "it ends", LOST_SECS)
            wait_until(lambda: len(nodes.workers("ReplicaActor")) == 1, "its actor ends", LOST_SECS)
        finally:
            is_over = True
        assert all(each.result(WAIT_SECS) for each in ends)
    assert re.search(r'ray_controller.py:\d+\] "model changed .*model=repeat', nodes.log())
    assert streamed(http, 5) == 5
    found = http.get("/v2/models/repeat/config").json()
    assert found["parameters"]["engine"] == {"string_value": "new"}


def test_a_new_version_with_a_plan_gets_its_share_and_is_taken_back(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes, models: Path
) -> None:
    def state() -> str:
        return str(http.get("/v2/models/repeat/rollout").json().get("state"))

    def version() -> str:
        body = {"text_input": "x", "n": 1, "delay_us": 0}
        found = http.post("/v2/models/repeat/generate", json=body).json()
        return str(found["model_version"])

    (before,) = fleet.replicas("repeat")
    (models / "repeat" / "2").mkdir()
    wait_until(lambda: state() == "step", "the candidate is there", LOST_SECS)
    assert {version() for _ in range(40)} == {"1", "2"}
    aborted = http.post("/v2/models/repeat/rollout/abort", json={"reason": "enough"})
    assert (aborted.status_code, aborted.json()["state"]) == (200, "aborted")
    assert {version() for _ in range(20)} == {"1"}
    assert fleet.wait_replicas("repeat", 1) == [before]
    wait_until(lambda: len(nodes.workers("ReplicaActor")) == 1, "its actor ends", LOST_SECS)
    assert b'"state":"aborted"' in nodes.record(fleet.name, "repeat")
    (models / "repeat" / "2").rmdir()  # a changed configuration would begin another rollout
