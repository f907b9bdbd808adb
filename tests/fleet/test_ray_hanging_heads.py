"""`sluice fleet` at a head that hangs once the command is connected to it."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace

import pytest
from rich.console import Console

from gateway.fleet.ray_addresses import encode
from gateway.fleet.ray_views import ReplicaPhase
from tests.fleet.fake_ray import NAME, FakeRay
from tests.fleet.nodes import Fleet, RayNodes
from tests.serving import ROOT, wait_until

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


class Ends:
    """The exit statuses of ends of this process that did not happen, and its hooks at the exit."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.hooks: list[Callable[[], None]] = []


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    from gateway.fleet import ray_command

    found = Ends()
    monkeypatch.setattr(ray_command, "PROGRESS_SECS", 1.0)
    monkeypatch.setattr(ray_command, "EXIT_SECS", 0.1)
    monkeypatch.setattr(ray_command, "atexit", SimpleNamespace(register=found.hooks.append))
    monkeypatch.setattr(ray_command.os, "_exit", found.statuses.append)
    return found


def test_a_command_that_ray_answers_does_not_end_for_its_length(
    monkeypatch: pytest.MonkeyPatch, fake: FakeRay, ends: Ends
) -> None:
    from gateway.fleet import ray_cluster, ray_command

    monkeypatch.setattr(fake, "drain", lambda name: None)
    fake.add(NAME, ReplicaPhase.READY)
    began_at = time.monotonic()
    with ray_command.Watchdog("the end") as watchdog:
        assert ray_cluster.end_fleet("f", 2.0, watchdog.progress) == 1
    assert time.monotonic() - began_at >= 2
    assert ends.statuses == []


def test_a_result_that_comes_as_the_time_is_over_is_too_late(
    monkeypatch: pytest.MonkeyPatch, ray: None, ends: Ends
) -> None:
    from gateway.fleet import ray_command

    is_over, has_result = Event(), Event()

    def place() -> str:
        is_over.set()
        has_result.wait(0.5)
        return "the head"

    monkeypatch.setattr(ray_command.ray_state, "place", place)
    with ray_command.Watchdog("the end"):
        assert is_over.wait(ENDS_SECS)
    has_result.set()
    assert ends.statuses == [1]


@pytest.mark.parametrize("fails", [False, True], ids=["slowly", "not-at-all"])
@pytest.mark.parametrize("action", ["status", "down"])
def test_a_result_may_be_shown_slowly_and_one_that_cannot_be_shown_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, fake: FakeRay, ends: Ends, action: str, fails: bool
) -> None:
    from gateway.fleet import ray_command

    def show(*given: object) -> None:
        time.sleep(1.5)
        if fails:
            raise BrokenPipeError

    fake.views["sluice:f"] = encode([])
    console = Console()
    monkeypatch.setattr(console, "print", show)
    monkeypatch.setattr(ray_command.ray_state, "connect", lambda: None)
    with pytest.raises(BrokenPipeError) if fails else nullcontext():
        ray_command.run(Namespace(action=action, fleet_name="f", drain_secs=1.0), console)
    assert ends.statuses == []
    (leave,) = ends.hooks
    leave()
    wait_until(lambda: ends.statuses == [int(fails)], "it ends", ENDS_SECS)
