"""Processes end when the one that has started them is killed."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backends.vllm.engine_processes import FollowingSettings, follow_parent, wait_for_exit
from backends.vllm.start_reports import StartReporter

GONE_SECS = 10.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

PARENT = """
import multiprocessing, sys, time
from backends.vllm.engine_processes import FollowingSettings, follow_parent
from backends.vllm.start_reports import StartReporter

def told(_):
    print("up", flush=True)
    time.sleep(60)

def plugged():
    follow_parent()
    told(None)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    if sys.argv[1] == "told":
        child = context.Process(target=told, args=(FollowingSettings({}, StartReporter(None)),))
    else:
        child = context.Process(target=plugged)
    child.start()
    print(child.pid, flush=True)
    child.join()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "parent.py"
    path.write_text(PARENT)
    return path


@pytest.fixture(params=[("told", "spawn"), ("plugged", "spawn"), ("plugged", "fork")], ids="-".join)
def family(script: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A parent whose child follows it, in one of the ways and by one of the start methods."""
    with subprocess.Popen(
        [sys.executable, str(script), *request.param],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as parent:
        yield parent
        parent.kill()


def test_a_child_ends_when_its_parent_is_killed(family: subprocess.Popen[str]) -> None:
    assert family.stdout is not None
    said = {family.stdout.readline().strip() for _ in range(2)}
    child = psutil.Process(int((said - {"up"}).pop()))
    family.kill()
    psutil.wait_procs([child], timeout=GONE_SECS)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_terminal_interrupts_the_parent_alone(script: Path) -> None:
    command = [sys.executable, str(script), "told", "spawn"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as parent:
        assert parent.stdout is not None
        said = {parent.stdout.readline().strip() for _ in range(2)}
        child = int((said - {"up"}).pop())
        assert os.getpgid(child) == child != os.getpgid(parent.pid)
        parent.kill()


def test_settings_stay_settings_where_they_were_made() -> None:
    settings = FollowingSettings({"a": 1}, StartReporter(None))
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings == {"a": 1}
    assert isinstance(copy, FollowingSettings)


def test_a_process_without_a_parent_follows_none() -> None:
    follow_parent()


def test_a_parent_that_is_none_has_ended_already() -> None:
    wait_for_exit(os.getpid())
