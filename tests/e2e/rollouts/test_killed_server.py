"""A server that is killed in the middle of a rollout, or whose disk hangs at its exit."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from gateway.protos import grpc_service_pb2 as pb
from tests.rpc import connected
from tests.serving import Serving, serving, wait_until

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


def versions(server: Serving, fields_of: Callable[[str], dict[str, Any]]) -> list[str]:
    """The version that answers each user."""
    return [answer(server, **fields_of(user)) for user in USERS]


def answer(server: Serving, **fields: Any) -> str:
    """The version that the answer names."""
    tensor = {"name": "INPUT0", "shape": [1], "datatype": "INT32", "data": [1]}
    body = {"inputs": [tensor], "parameters": fields.pop("parameters", {})}
    found = httpx.post(f"{server.http}/v2/models/m/infer", json=body, timeout=20, **fields)
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
    return {row["version"] for row in index if row.get("state") == "READY"}


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
