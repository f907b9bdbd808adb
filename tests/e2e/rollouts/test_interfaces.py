"""Rollouts of a running server over its interfaces: HTTP, gRPC, the command line, metrics."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.struct_pb2 import Struct

from gateway import cli
from gateway.protos import rollout_pb2 as pb
from gateway.protos.rollout_pb2_grpc import RolloutServiceStub
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT0" data_type: TYPE_INT32 dims: 1 }
version_policy { specific { versions: [1] } }
"""
pytestmark = pytest.mark.own_models("rollouts of the server")
BOTH = pytest.mark.runs_on("grpcio", "frontends")
UNKNOWN = "request: Object contains unknown field"
OF_START = (
    "expected one of reason, version, again, alpha, guardrails, interrupt, key, max_wait, "
    "on_breach, on_silence, prove, shadow_in_flight, shadow_side_effects, steps"
)
LONG = [{"weight": 10, "for": "1h"}, {"weight": 100, "for": "1h"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the server's models, state and audit log."""
    return tmp_path_factory.mktemp("interfaces")


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    """The model `m`, whose version 2 is loaded by rollouts only."""
    write_model(folder / "models", "m", CONFIG, versions=(1, 2))
    return folder / "models"


@pytest.fixture(scope="module")
def server(folder: Path, models: Path, server_kind: None) -> Iterator[Serving]:
    """A server of the model."""
    flags = ("--model-control-mode=explicit", "--load-model=m")
    audit = f"--audit-log={folder / 'audit'}"
    with serving(models, *flags, audit, f"--state-directory={folder}") as found:
        yield found


@pytest.fixture
def rolling(server: Serving) -> Serving:
    """The server with a rollout of version 2 at 10 %."""
    begin(server)
    return server


@pytest.fixture(autouse=True)
def ended(server: Serving) -> Iterator[None]:
    """No rollout is open after a test, and version 2 is unloaded."""
    yield
    post(server, "abort")
    url = f"{server.http}/v2/models/m/versions/2/ready"
    wait_until(lambda: not httpx.get(url, timeout=WAIT_SECS).is_success, "version 2 is unloaded")


def begin(server: Serving) -> None:
    """Begin a rollout at 10 %."""
    found = post(server, "start", version=2, steps=LONG, again=True)
    assert found.status_code == 200, found.text


def post(server: Serving, action: str, **members: Any) -> httpx.Response:
    """Ask for a change over HTTP."""
    url = f"{server.http}/v2/models/m/rollout/{action}"
    return httpx.post(url, json=members, timeout=WAIT_SECS)


def state(server: Serving) -> dict[str, Any]:
    """The state over HTTP."""
    found = httpx.get(f"{server.http}/v2/models/m/rollout", timeout=WAIT_SECS)
    assert found.status_code == 200, found.text
    members: dict[str, Any] = found.json()
    return members


def struct(**members: Any) -> Struct:
    """Members of a change over gRPC."""
    found = Struct()
    found.update(members)
    return found


@contextmanager
def service(server: Serving) -> Iterator[Any]:
    """The stub of RolloutService."""
    with grpc.insecure_channel(server.grpc) as channel:
        yield RolloutServiceStub(channel)


def sent(stream: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events in the lines of a stream: `event`, `id`, `data`."""
    found: dict[str, Any] = {}
    for line in stream:
        name, _, value = line.partition(": ")
        if line:
            found[name] = json.loads(value) if name == "data" else value
        else:
            yield found
            found = {}


def run(server: Serving, *arguments: str) -> int:
    """Run `sluice rollout`; its exit status."""
    try:
        cli.main(["rollout", *arguments, f"--url={server.http}"])
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def test_a_rollout_is_changed_and_shown_over_http(rolling: Serving) -> None:
    assert post(rolling, "pause", reason="lunch").json()["state"] == "paused"
    assert post(rolling, "resume").json()["weight"] == 10
    assert post(rolling, "weight", weight=25).json()["weight"] == 25
    rows = httpx.get(f"{rolling.http}/v2/rollouts", timeout=WAIT_SECS).json()
    assert rows == [state(rolling)]
    page = httpx.get(f"{rolling.http}/playground/state", timeout=WAIT_SECS).json()
    assert page["rollouts"][0]["state"] == "paused"
    assert (rows[0]["stable"], rows[0]["candidate"], rows[0]["step"]) == (1, 2, 1)
    url = f"{rolling.http}/v2/models/m/rollout/history"
    changes = httpx.get(url, timeout=WAIT_SECS).json()[-3:]
    assert [each["state"] for each in changes] == ["paused", "step", "paused"]
    assert (changes[0]["by"], changes[0]["reason"]) == ("api:127.0.0.1", "lunch")


@pytest.mark.parametrize(
    ("action", "members", "text"),
    [
        ("start", {"version": 2, "stepz": []}, f"{UNKNOWN} `stepz`, {OF_START}"),
        ("start", {"steps": LONG}, "request: Object missing required field `version`"),
        ("start", {"version": "2"}, "request: Expected `int`, got `str` - at `$.version`"),
        ("start", {"version": 1}, "version 1 of model 'm' is stable already"),
        (
            "start",
            {"version": 2, "steps": [{"weight": 50}]},
            'request: steps[0].weight is 50.0, expected 100 in the last step, or "pause": true',
        ),
        (
            "start",
            {"version": 2, "steps": [{"weight": 50}, {"weight": 10}]},
            "request: steps[1].weight is 10.0, expected 50 or more: none falls",
        ),
        ("start", {"version": 2, "start": "manual"}, f"{UNKNOWN} `start`, {OF_START}"),
        ("pause", {"version": 2}, f"{UNKNOWN} `version`, expected one of reason"),
        ("weight", {}, "request: Object missing required field `weight`"),
    ],
)
def test_a_change_with_wrong_members_is_refused_with_the_reason(
    server: Serving, action: str, members: dict[str, Any], text: str
) -> None:
    found = post(server, action, **members)
    assert (found.status_code, found.json()["error"]) == (400, text)


def test_an_unknown_version_or_model_is_not_found(server: Serving) -> None:
    found = post(server, "start", version=7)
    assert (found.status_code, found.json()["error"]) == (
        404,
        "model 'm' has no version 7, it has 1, 2",
    )
    found = httpx.get(f"{server.http}/v2/models/absent/rollout", timeout=WAIT_SECS)
    assert (found.status_code, found.json()["error"]) == (404, "model 'absent' is not loaded")


def test_one_rollout_at_a_time(rolling: Serving) -> None:
    found = post(rolling, "start", version=2)
    expected = "model 'm' has a rollout of version 2 (step); promote or abort it first"
    assert (found.status_code, found.json()["error"]) == (400, expected)


def test_a_change_and_its_transition_have_lines_in_the_audit_log(
    rolling: Serving, folder: Path
) -> None:
    def asked_times() -> int:
        return (folder / "audit").read_text().count('rollout-pause"')

    before = asked_times()
    post(rolling, "pause", reason="lunch")
    wait_until(lambda: asked_times() > before, "the line is there")
    lines = [json.loads(each) for each in (folder / "audit").read_text().splitlines()]
    made, asked = [each for each in lines if each["action"].startswith("rollout-pause")][-2:]
    assert (made["action"], made["by"], made["to"]) == ("rollout-paused", "api:127.0.0.1", 2)
    assert (asked["area"], asked["model"], asked["result"]) == ("model-repository", "m", "ok")


def test_the_command_starts_shows_and_ends_a_rollout(
    server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ("--step=10%:1h", "--step=100%:1h")
    assert run(server, "start", "m", "2", *steps, "--again", "--reason=ours") == 0
    assert run(server, "weight", "m", "25%", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["server"], row["weight"], row["state"]) == (server.http, 25, "paused")
    assert run(server, "wait", "m") == 3
    assert run(server, "resume", "m") == 0
    assert run(server, "wait", "m", "--timeout=1s") == 5
    assert run(server, "status") == 0
    assert "1 -> 2" in capsys.readouterr().out
    assert run(server, "abort", "m") == 0
    assert run(server, "wait", "m") == 4
    assert run(server, "history", "m") == 0
    assert "ours" in capsys.readouterr().out


def test_the_command_fails_with_the_reason_of_the_server(
    server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "start", "m", "7") == 1
    assert "model 'm' has no version 7" in capsys.readouterr().err


@BOTH
def test_a_rollout_is_changed_and_shown_over_grpc(server: Serving) -> None:
    with service(server) as stub:
        members = struct(version=2, steps=LONG, again=True, reason="ours")
        asked = pb.ChangeRolloutRequest(model_name="m", action="start", members=members)
        begun = stub.Change(asked, timeout=WAIT_SECS).rollout
        assert (begun.state, begun.weight, begun.candidate) == ("step", 10, 2)
        assert [(each.weight, getattr(each, "for")) for each in begun.steps] == [
            (10, "1h"),
            (100, "1h"),
        ]
        found = stub.Get(pb.GetRolloutRequest(model_name="m", history=True), timeout=WAIT_SECS)
        assert (found.rollout.state, found.history[-1].reason) == ("step", "ours")
        assert found.history[-1].by == "api:127.0.0.1"
        weight = pb.ChangeRolloutRequest(model_name="m", action="weight", members=struct(weight=25))
        assert stub.Change(weight, timeout=WAIT_SECS).rollout.weight == 25
        (listed,) = stub.List(pb.ListRolloutsRequest(), timeout=WAIT_SECS).rollouts
        assert (listed.weight, listed.state) == (25, "paused")
        ended = stub.Change(
            pb.ChangeRolloutRequest(model_name="m", action="abort"), timeout=WAIT_SECS
        )
        assert ended.rollout.state == "aborted"


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        (
            pb.ChangeRolloutRequest(model_name="m", action="begin"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "action is 'begin', expected one of start, pause, resume, promote, abort, weight",
        ),
        (
            pb.ChangeRolloutRequest(
                model_name="m", action="start", members=struct(version=2, stepz=1)
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{UNKNOWN} `stepz`, {OF_START}",
        ),
        (
            pb.ChangeRolloutRequest(model_name="m", action="start", members=struct(version=7)),
            grpc.StatusCode.NOT_FOUND,
            "model 'm' has no version 7, it has 1, 2",
        ),
    ],
    ids=["action", "member", "version"],
)
def test_a_wrong_change_is_refused_over_grpc(
    server: Serving, asked: pb.ChangeRolloutRequest, status: grpc.StatusCode, text: str
) -> None:
    with service(server) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Change(asked, timeout=WAIT_SECS)
    assert (caught.value.code(), caught.value.details()) == (status, text)


@BOTH
def test_events_come_over_both_wires(server: Serving) -> None:
    url = f"{server.http}/v2/rollouts/events"
    with (
        service(server) as stub,
        httpx.stream("GET", url, timeout=WAIT_SECS) as answer,
    ):
        watched = stub.Watch(pb.WatchRolloutsRequest(), timeout=WAIT_SECS)
        streamed = sent(answer.iter_lines())
        first = next(streamed)
        assert (first["event"], next(watched).kind) == ("reset", "reset")
        assert first["data"]["versions"][0]["version"] == "1"
        begin(server)
        step = next(each for each in streamed if each["event"] == "step")
        same = next(each for each in watched if each.kind == "step")
        assert step["id"] == same.id
        assert step["data"]["weight"] == same.transition.weight == 10
        post(server, "abort")
        state = next(each for each in streamed if each["event"] == "state")
        assert state["data"]["state"] == "aborted"
        watched.cancel()
    with httpx.stream("GET", url, headers={"Last-Event-ID": step["id"]}, timeout=WAIT_SECS) as late:
        again = next(each for each in sent(late.iter_lines()) if each["event"] == "state")
    assert again == state


def test_a_rollout_has_metrics(server: Serving) -> None:
    post(server, "start", version=2, steps=LONG, guardrails={"errors": {}}, again=True)
    post(server, "weight", weight=25)
    found = server.metrics()
    assert found['gateway_rollout_weight{label="canary",model="m",version="2"}'] == 25
    assert found['gateway_rollout_weight{label="stable",model="m",version="1"}'] == 75
    assert found['gateway_rollout_state{model="m",state="paused"}'] == 1
    assert found['gateway_rollout_evidence{guardrail="errors",model="m"}'] == 0
    assert found['gateway_rollout_evidence_limit{guardrail="errors",model="m"}'] == 2
    events = 'gateway_rollout_events_total{guardrail="errors",model="m",version="2"}'
    assert found[events] == 0
    decisions = 'gateway_rollout_decisions_total{decision="aborted",model="m"}'
    aborted = found.get(decisions, 0)
    post(server, "abort")
    assert server.metrics()[decisions] == aborted + 1


def test_readers_of_events_do_not_delay_the_end(models: Path) -> None:
    with serving(models, "--exit-timeout-secs=20") as server, service(server) as stub:
        watched = stub.Watch(pb.WatchRolloutsRequest(), timeout=WAIT_SECS)
        url = f"{server.http}/v2/rollouts/events"
        with httpx.stream("GET", url, timeout=WAIT_SECS) as answer:
            streamed = sent(answer.iter_lines())
            assert (next(streamed)["event"], next(watched).kind) == ("reset", "reset")
            begun = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begun < 5
            assert not [each for each in streamed if each["event"] == "reset"]
        with pytest.raises(grpc.RpcError, match="Server exiting"):
            list(watched)
