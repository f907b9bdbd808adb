"""Instances share a budget of threads, and never compute with more of them together."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from backends.pytorch.parameters import ThreadBudget
from tests import torch_models as models

WAIT_SECS = 20.0
BUDGET = 4
ROOT = Path(__file__).parents[3]


def joined(threads: ThreadBudget, count: int) -> ThreadBudget:
    for _ in range(count):
        threads.join()
    return threads


@pytest.mark.parametrize(("instances", "share"), [(0, 8), (1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_the_budget_is_divided_among_the_instances(instances: int, share: int) -> None:
    assert joined(ThreadBudget(8), instances).share == share


def test_the_default_budget_is_the_cpus_of_the_process() -> None:
    assert ThreadBudget().budget == len(os.sched_getaffinity(0))


def test_a_closed_instance_releases_its_share() -> None:
    threads = joined(ThreadBudget(8), 2)
    threads.leave()
    assert threads.share == 8


def test_the_first_model_to_set_the_count_wins(caplog: pytest.LogCaptureFixture) -> None:
    threads = joined(ThreadBudget(8), 1)
    with caplog.at_level(logging.WARNING, logger="sluice.pytorch"):
        threads.ask(3, 0, "first")
        threads.ask(3, 0, "same")
        assert caplog.records == []
        threads.ask(2, 0, "other")
        threads.ask(0, 0, "silent")
    assert threads.share == 3
    (record,) = caplog.records
    assert (vars(record)["model"], vars(record)["wanted"], vars(record)["have"]) == ("other", 2, 3)


def test_a_count_that_pytorch_refuses_is_logged_and_not_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ThreadBudget(2).ask(0, 2**70, "m")
    assert "inter-op threads not set" in caplog.text


def test_no_model_gets_more_than_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    threads = joined(ThreadBudget(2), 1)
    with caplog.at_level(logging.WARNING, logger="sluice.pytorch"):
        threads.ask(99, 0, "greedy")
    assert threads.share == 2
    assert len(caplog.records) == 1


def test_a_run_waits_until_its_share_is_free() -> None:
    threads = joined(ThreadBudget(2), 1)
    threads.ask(2, 0, "m")
    began = threading.Event()

    def second() -> int:
        began.set()
        with threads.taken() as count:
            return count

    with ThreadPoolExecutor(1) as pool:
        with threads.taken() as count:
            assert count == 2
            waiting = pool.submit(second)
            assert began.wait(WAIT_SECS)
            assert not waiting.done()
        assert waiting.result(WAIT_SECS) == 2


def test_runs_whose_shares_fit_are_concurrent() -> None:
    threads = joined(ThreadBudget(2), 2)
    both = threading.Barrier(2)

    def run() -> int:
        with threads.taken() as count:
            both.wait(WAIT_SECS)
            return count + torch.get_num_threads()

    with ThreadPoolExecutor(2) as pool:
        assert [each.result(WAIT_SECS) for each in [pool.submit(run), pool.submit(run)]] == [2, 2]


def test_a_run_that_fails_gives_its_share_back() -> None:
    threads = joined(ThreadBudget(1), 1)
    with pytest.raises(ZeroDivisionError), threads.taken():
        _ = 1 / 0
    with threads.taken() as count:
        assert count == 1


@pytest.mark.parametrize("instances", [pytest.param(1, marks=pytest.mark.release), 4])
def test_instances_compute_with_no_more_threads_than_the_budget(
    instances: int, tmp_path: Path
) -> None:
    """Run in a process of its own, whose CPU times by thread show which threads computed.

    PyTorch also starts a pool for quantised operations, whose threads idle here.
    """
    models.script(models.Busy(), tmp_path / "model.pt")
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(instances), str(BUDGET)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) <= BUDGET


COUNT = '''
import asyncio, os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np, torch
from backends.pytorch.backend import PytorchBackend
from backends.pytorch.instance import PytorchInstance
from gateway.config.data_type import DataType
from gateway.tensor import Datatype, array_tensor
from tests.backends.pytorch.conftest import context
from tests.torch_models import config_of

def used():
    """Ticks of CPU in user space, by thread."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            found[task] = int(open(f"/proc/self/task/{task}/stat").read().split()[13])
        except FileNotFoundError:
            pass  # the thread has ended meanwhile
    return found

RUNS, TICKS = 3, 3  # enough that every thread that computes has used 30 ms

async def main(folder, count):
    config = config_of("model.pt", {"x": DataType.TYPE_FP32}, {"y": DataType.TYPE_FP32})
    backend = PytorchBackend()
    backend.settings = {"thread-count": sys.argv[3]}
    instances = [await backend.load(context(config, folder)) for _ in range(count)]
    x = array_tensor("x", Datatype.FP32, np.zeros((600, 600), dtype="<f4"))
    before = used()
    with ThreadPoolExecutor(count) as pool:
        runs = [
            pool.submit(each.run, {"x": x}, ["y"], frozenset())
            for _ in range(RUNS)
            for each in instances
        ]
        for run in runs:
            run.result()
        after = used()
    main = str(os.getpid())
    print(sum(after[task] - before.get(task, 0) >= TICKS for task in after if task != main))

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
'''
