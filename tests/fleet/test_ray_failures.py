"""Failures of the parts of a Ray cluster, and changes of the number of replicas."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.models import REPEAT, identity, with_parameters
from tests.fleet.nodes import LOST_SECS, Fleet, RayNodes
from tests.serving import WAIT_SECS, Serving, running, wait_until, write_model

pytestmark = [pytest.mark.ray, pytest.mark.release, pytest.mark.timeout(300)]

CHANGING = {
    "replicas": "1..2",
    "scale_target_wait_ms": 100,
    "scale_up_secs": 1,
    "scale_down_secs": 8,
    "replica_resources": '{"CPU": 0.25}',
}
SMALL = {"replica_resources": '{"CPU": 0.25}'}
BUSY_CLIENTS, BUSY_SECS = 16, 30.0
TIMED = """backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [1] } ]
"""
TIMED_CODE = """
import time
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({secs})
        texts = [pb.get_input_tensor_by_name(each, "TEXT").as_numpy() for each in requests]
        return [pb.InferenceResponse([pb.Tensor("SAID", each)]) for each in texts]
"""
SLOW_SECS = 0.3
PLAN = {
    "steps": [{"weight": 50, "for": "10m"}, {"weight": 100, "for": "10m"}],
    "guardrails": {"slow_first_response": {"ms": 1000 * SLOW_SECS / 2, "max": 0.1}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "models"
    write_model(folder, "repeat", REPEAT + with_parameters({**SMALL, "replicas": 2}))
    write_model(folder, "broken", 'backend: "none"\n' + with_parameters(SMALL))
    write_model(folder, "slow", identity("BYTES", "1", delay_us=100_000, **CHANGING))
    write_model(folder, "timed", TIMED + with_parameters(SMALL))
    (folder / "timed" / "1" / "model.py").write_text(TIMED_CODE.format(secs=0))
    (folder / "timed" / "rollout.json").write_text(json.dumps(PLAN))
    return folder


@pytest.fixture(scope="module")
def fleet(nodes: RayNodes) -> Fleet:
    return Fleet("failing", nodes.address)


@pytest.fixture(scope="module")
def router(
    models: Path, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A router of replicas that listen for all machines, since they have a secret."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("s" * 32)
    own = (f"--fleet-name={fleet.name}", f"--fleet-secret-file={secret}")
    flags = ("--fleet=ray", *own)
    with running(Serving(models, flags, fleet.environment)) as found:
        yield found
        fleet.command("down")
    assert "Traceback" not in found.text


@pytest.fixture
def http(router: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.http, timeout=WAIT_SECS) as found:
        for model in ("repeat", "slow", "timed"):
            path = f"/v2/models/{model}/ready"
            wait_until(lambda: found.get(path).is_success, f"{model} is ready", LOST_SECS)  # noqa: B023
        yield found


def streamed(http: httpx.Client) -> bool:
    """Whether a stream arrives as a whole."""
    body = {"text_input": "x", "n": 5, "delay_us": 0}
    with http.stream("POST", "/v2/models/repeat/generate_stream", json=body) as answer:
        return sum(line.startswith("data:") for line in answer.iter_lines()) == 5


def test_replicas_of_a_node_that_is_killed_are_replaced_on_another(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes
) -> None:
    nodes.add("b")
    lost = fleet.wait_replicas("repeat", 2)[0]
    zone = nodes.zone(lost)
    nodes.kill(zone)
    wait_until(lambda: lost not in fleet.replicas("repeat"), "it ends with its node", LOST_SECS)
    for each in fleet.wait_replicas("repeat", 2):
        assert nodes.zone(each) != zone
    wait_until(lambda: http.get("/v2/models/repeat/ready").is_success, "one is ready", LOST_SECS)
    assert streamed(http)
    nodes.add(zone)


def test_the_reason_of_a_replica_that_does_not_start_is_named(
    http: httpx.Client, fleet: Fleet, router: Serving
) -> None:
    reason = "unable to find backend 'none'"
    router.wait_logged(reason, LOST_SECS)
    wait_until(lambda: reason in fleet.command("status").stdout, "the status has it", LOST_SECS)
    assert streamed(http)


def test_replicas_of_a_draining_node_are_replaced_before_they_end(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes
) -> None:
    nodes.add("b")
    before = fleet.wait_replicas("repeat", 2)
    zone = nodes.zone(before[0])
    nodes.drain(zone)
    wait_until(lambda: len(fleet.replicas("repeat")) > 2, "another one starts", LOST_SECS)
    assert before[0] in fleet.replicas("repeat")
    wait_until(lambda: before[0] not in fleet.replicas("repeat"), "it ends", LOST_SECS)
    for each in fleet.wait_replicas("repeat", 2):
        assert nodes.zone(each) != zone
    assert streamed(http)
    nodes.kill(zone)
    nodes.add(zone)


def test_requests_continue_without_the_state_of_the_cluster(
    http: httpx.Client, fleet: Fleet, nodes: RayNodes
) -> None:
    before = fleet.wait_replicas("repeat", 2)
    nodes.kill_gcs()
    assert streamed(http)
    nodes.start_gcs()
    wait_until(lambda: "READY" in fleet.command("status").stdout, "it has a status", LOST_SECS)
    assert streamed(http)
    assert sorted(fleet.replicas("repeat")) == sorted(before)


def test_replicas_come_with_requests_that_wait_and_end_without_them(
    http: httpx.Client, fleet: Fleet
) -> None:
    fleet.wait_replicas("slow", 1)
    text = {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    is_over = False

    def client() -> None:
        while not is_over:
            assert http.post("/v2/models/slow/infer", json=text).is_success

    with ThreadPoolExecutor(BUSY_CLIENTS) as clients:
        ends = [clients.submit(client) for _ in range(BUSY_CLIENTS)]
        try:
            fleet.wait_replicas("slow", 2)
        finally:
            is_over = True
        for each in ends:
            each.result(BUSY_SECS)
    fleet.wait_replicas("slow", 1)


def test_a_new_version_that_is_slow_is_taken_back_and_its_requests_are_answered(
    http: httpx.Client, fleet: Fleet, models: Path, tmp_path: Path
) -> None:
    text = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}

    def rollout() -> dict[str, Any]:
        found: dict[str, Any] = http.get("/v2/models/timed/rollout").json()
        return found

    def asked(count: int) -> set[str]:
        answers = [http.post("/v2/models/timed/infer", json=text) for _ in range(count)]
        assert all(each.is_success for each in answers)
        return {each.json()["model_version"] for each in answers}

    before = fleet.wait_replicas("timed", 1)
    (tmp_path / "model.py").write_text(TIMED_CODE.format(secs=SLOW_SECS))
    tmp_path.rename(models / "timed" / "2")
    wait_until(lambda: rollout().get("state") == "step", "the candidate is there", LOST_SECS)
    found = set[str]()

    def is_over() -> bool:
        found.update(asked(20))
        return rollout()["state"] != "step"

    wait_until(is_over, "the candidate is judged", LOST_SECS)
    assert found == {"1", "2"}
    assert rollout()["state"] == "rolled_back"
    assert "slow_first_response" in rollout()["reason"]
    assert asked(20) == {"1"}
    assert fleet.wait_replicas("timed", 1) == before
