"""`sluice fleet` at a head that hangs once the command is connected to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gateway.fleet.ray_views import ReplicaPhase
from tests.fleet.fake_ray import NAME, FakeRay
from tests.fleet.nodes import Fleet, RayNodes
from tests.serving import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]

ENDS_SECS = 60.0
"""The imports of a command take seconds on a busy machine."""
PROGRESS_SECS, EXIT_SECS = 3.0, 2.0
COMMAND = f"""
import os, signal, sys
from gateway.cli import main
from gateway.fleet import ray_cluster, ray_command, ray_state

ray_command.PROGRESS_SECS, ray_command.EXIT_SECS = {PROGRESS_SECS}, {EXIT_SECS}

state, name, action = sys.argv[1:]
owner = ray_state if name == "connect" else ray_cluster
function = getattr(owner, name)

def stopping(*arguments):
    try:
        return function(*arguments)
    finally:
        sys.stderr.write("stopped\\n")
        os.kill(int(state), signal.SIGSTOP)

setattr(owner, name, stopping)
main(["fleet", action, "--fleet-name=f"])
"""
"""`sluice fleet`, which stops that process of the head as a function of its own returns."""


@pytest.fixture
def state(nodes: RayNodes) -> Iterator[int]:
    """The process of the head that has the state of the cluster; it runs after the test."""
    found = nodes.gcs
    yield found
    os.kill(found, signal.SIGCONT)


@pytest.mark.parametrize(
    ("action", "after", "status", "said"),
    [
        ("status", "connect", 1, "waited for the status of fleet 'f'"),
        ("down", "connect", 1, "waited for the end of fleet 'f'"),
        ("down", "RayCluster", 1, "waited for the end of fleet 'f'"),
        ("status", "next_status", 1, "fleet 'f' has no controller"),
        ("down", "end_fleet", 0, ""),
    ],
    ids=[
        "status",
        "down",
        "down-without-a-controller",
        "exit-after-an-error",
        "exit-after-a-result",
    ],
)
def test_a_command_whose_head_hangs_after_it_has_connected_ends(
    nodes: RayNodes, state: int, action: str, after: str, status: int, said: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, str(state), after, action],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **Fleet("f", nodes.address).environment},
        timeout=ENDS_SECS,
    )
    assert "stopped" in ended.stderr
    assert ended.returncode == status, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("sluice: ")]
    assert len(lines) == bool(said)
    assert said in "".join(lines)
    assert "Traceback" not in ended.stderr


def test_a_command_that_ray_answers_does_not_end_for_its_length(
    monkeypatch: pytest.MonkeyPatch, fake: FakeRay
) -> None:
    from gateway.fleet import ray_cluster, ray_command

    ended: list[int] = []
    monkeypatch.setattr(ray_command, "PROGRESS_SECS", 1.0)
    monkeypatch.setattr(ray_command, "atexit", SimpleNamespace(register=lambda hook: None))
    monkeypatch.setattr(ray_command.os, "_exit", ended.append)
    monkeypatch.setattr(fake, "drain", lambda name: None)
    fake.add(NAME, ReplicaPhase.READY)
    began_at = time.monotonic()
    with ray_command.Watchdog("the end") as watchdog:
        assert ray_cluster.end_fleet("f", 2.0, watchdog.progress) == 1
    assert time.monotonic() - began_at >= 2
    assert ended == []
