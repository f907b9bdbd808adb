"""A server that is killed in the middle of a rollout, or whose disk hangs at its exit."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.protos import grpc_service_pb2 as pb
from tests.rpc import connected
from tests.serving import Serving, serving, wait_until, write_model

pytestmark = pytest.mark.own_models("rollouts of the server")

CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: 1 }
"""
PLAN = {
    "steps": [{"weight": 50, "for": "10m", "min_requests": 0}, {"weight": 100, "for": "1h"}],
    "key": ["header:x-user", "parameter:user"],
}
USERS = [f"user-{number}" for number in range(12)]
FLOATS = CONFIG.replace("INT32", "FP32")
HALF = [{"weight": 50, "for": "1h"}, {"weight": 100, "for": "1h"}]
ALL = [{"weight": 100, "for": "1h"}]
STATES: dict[str, dict[str, Any]] = {
    "waiting": {"start": "manual", "steps": HALF},
    "step": {"steps": HALF},
    "baking": {"steps": ALL},
    "paused": {"steps": HALF},
    "promoted": {"steps": HALF},
    "rolled_back": {"steps": ALL, "guardrails": {"nan": {"max": 0.01}}},
    "aborted": {"steps": HALF},
    "superseded": {"steps": HALF},
}
"""Each state of a rollout, and the plan of a rollout that reaches it."""


def versions(server: Serving, fields_of: Callable[[str], dict[str, Any]]) -> list[str]:
    """The version that answers each user."""
    return [answer(server, **fields_of(user)) for user in USERS]


def answer(
    server: Serving, model: str = "m", value: Any = 1, datatype: str = "INT32", **fields: Any
) -> str:
    """The version that the answer names."""
    tensor = {"name": "INPUT0", "shape": [1], "datatype": datatype, "data": [value]}
    body = json.dumps({"inputs": [tensor], "parameters": fields.pop("parameters", {})})
    url = f"{server.http}/v2/models/{model}/infer"
    found = httpx.post(url, content=body, timeout=20, **fields)
    version: str = found.json()["model_version"]
    return version


def by_metadata(server: Serving) -> list[str]:
    """The version that answers each user by ModelInfer; those of ModelStreamInfer are the same."""
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4)])
    message.inputs.add(name="INPUT0", shape=[1], datatype="INT32")
    found = []
    with connected(server.grpc) as stub:
        for user in USERS:
            metadata = [("x-user", user)]
            single = stub.ModelInfer(message, metadata=metadata, timeout=20)
            (streamed,) = stub.ModelStreamInfer(iter([message]), metadata=metadata, timeout=20)
            assert streamed.infer_response.model_version == single.model_version
            found.append(single.model_version)
    return found


def by_header(user: str) -> dict[str, Any]:
    return {"headers": {"X-User": user}}


def by_parameter(user: str) -> dict[str, Any]:
    return {"parameters": {"user": user}}


def loaded(server: Serving) -> set[str]:
    index = httpx.post(f"{server.http}/v2/repository/index", json={}, timeout=20).json()
    return {row["version"] for row in index if row["name"] == "m" and row.get("state") == "READY"}


def test_a_killed_server_continues_its_rollout_at_the_weight_it_had(tmp_path: Path) -> None:
    repository, state = tmp_path / "models", tmp_path / "state"
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "config.pbtxt").write_text(CONFIG)
    (repository / "m" / "rollout.json").write_text(json.dumps(PLAN))
    flags = (
        *("--model-control-mode=poll", "--repository-poll-secs=1"),
        f"--state-directory={state}",
    )
    with serving(repository, *flags) as first:
        assert set(versions(first, by_header)) == {"1"}
        (repository / "m" / "2").mkdir()
        record = state / "rollouts" / "m.json"
        wait_until(lambda: '"state":"step"' in read(record), "the rollout is on disk")
        before = versions(first, by_header)
        assert set(before) == {"1", "2"}
        assert versions(first, by_parameter) == before
        assert by_metadata(first) == before
        first.process.kill()
        first.wait_ended()
    with serving(repository, *flags) as second:
        assert loaded(second) == {"1", "2"}
        assert versions(second, by_header) == before


@pytest.mark.parametrize("state", STATES)
def test_a_server_that_is_killed_in_a_state_of_a_rollout_restarts_in_it(
    tmp_path: Path, state: str
) -> None:
    repository, record = tmp_path / "models", tmp_path / "state" / "rollouts" / "m.json"
    for name in ("m", "neighbour"):
        write_model(repository, name, FLOATS)
    plan = {"key": ["parameter:user"], **STATES[state]}
    (repository / "m" / "rollout.json").write_text(json.dumps(plan))
    flags = (
        *("--model-control-mode=explicit", "--load-model=*"),
        f"--state-directory={tmp_path / 'state'}",
    )
    with serving(repository, *flags) as first:
        publish(first, repository, 2)
        reach(first, repository, state)
        # The step before the superseded one is no proof of that behind it.
        written = ["superseded", "step"] if state == "superseded" else [state]
        now = written[-1]
        wait_until(lambda: on_disk(record)[-len(written) :] == written, "the state is on disk")
        before, answers = shown(first), answers_of(first)
        first.process.kill()
        first.wait_ended()
    weight, left, labels, answered = LEFT[state]
    assert (before["state"], before["weight"], before["labels"]) == (now, weight, labels)
    assert state in on_disk(record)
    with serving(repository, *flags) as second:
        assert shown(second) == before
        assert loaded(second) == left
        assert set(answers) == answered
        assert answers_of(second) == answers
        stable = str(labels["stable"])
        assert answer(second, "m/versions/stable", datatype="FP32") == stable
        assert answer(second, "neighbour", datatype="FP32") == "1"


BOTH = {"stable": 1, "canary": 2}
LEFT: dict[str, tuple[float, set[str], dict[str, int], set[str]]] = {
    "waiting": (0, {"1", "2"}, BOTH, {"1"}),
    "step": (50, {"1", "2"}, BOTH, {"1", "2"}),
    "baking": (100, {"1", "2"}, BOTH, {"2"}),
    "paused": (50, {"1", "2"}, BOTH, {"1", "2"}),
    "promoted": (100, {"2"}, {"stable": 2}, {"2"}),
    "rolled_back": (0, {"1"}, {"stable": 1}, {"1"}),
    "aborted": (0, {"1"}, {"stable": 1}, {"1"}),
    "superseded": (50, {"1", "3"}, {"stable": 1, "canary": 3}, {"1", "3"}),
}
"""By the state of the kill: weight, loaded versions, labels, and versions that answer."""


def on_disk(record: Path) -> list[str]:
    """The states of the transitions on disk, and then the present one."""
    found = json.loads(read(record) or "{}")
    if not found.get("rollout"):
        return []
    return [*(each["state"] for each in found["history"]), found["rollout"]["state"]]


def publish(server: Serving, repository: Path, version: int) -> None:
    """Add a version, and load the model."""
    (repository / "m" / str(version)).mkdir()
    url = f"{server.http}/v2/repository/models/m/load"
    assert httpx.post(url, json={}, timeout=20).is_success


def reach(server: Serving, repository: Path, state: str) -> None:
    """Bring the rollout from its first state into another one."""
    actions = {"paused": "pause", "promoted": "promote", "aborted": "abort"}
    if action := actions.get(state):
        url = f"{server.http}/v2/models/m/rollout/{action}"
        assert httpx.post(url, json={}, timeout=20).is_success
    elif state == "superseded":
        publish(server, repository, 3)
    elif state == "rolled_back":
        assert answers_of(server)[0] == "2"
        wait_until(
            lambda: answer(server, value=math.nan, datatype="FP32") == "1",
            "the candidate gets no requests",
        )


def answers_of(server: Serving) -> list[str]:
    """The version that answers each user."""
    return [answer(server, datatype="FP32", **by_parameter(user)) for user in USERS]


def shown(server: Serving) -> dict[str, Any]:
    """Place and history of the rollout, and the labels of the model."""
    url = f"{server.http}/v2/models/m"
    found = httpx.get(f"{url}/rollout", timeout=20).json()
    history = httpx.get(f"{url}/rollout/history", timeout=20).json()
    labels = httpx.get(f"{server.http}/v2/repository/models/m/labels", timeout=20).json()
    places = {key: found[key] for key in ("state", "weight", "stable", "candidate", "step")}
    return {**places, "history": history, "labels": labels["labels"]}


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_a_server_whose_disk_hangs_answers_and_ends(tmp_path: Path) -> None:
    repository, records = tmp_path / "models", tmp_path / "state" / "rollouts"
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "config.pbtxt").write_text(CONFIG)
    records.mkdir(parents=True)
    os.mkfifo(records / "m.json.new")  # without a reader, its writer waits for ever
    with serving(repository, f"--state-directory={tmp_path / 'state'}") as server:
        url = f"{server.http}/v2/repository/models/m/labels"
        assert httpx.post(url, json={"labels": {"champion": 1}}, timeout=20).is_success
        wait_until(lambda: (records / ".pid").exists(), "the write has begun")
        assert versions(server, by_header) == ["1"] * len(USERS)
        server.begin_stop()
        assert server.wait_ended(20) == 0
    assert "the state directory has not answered for 2 s (--state-directory)" in server.text
    assert "threads abandoned" in server.text
