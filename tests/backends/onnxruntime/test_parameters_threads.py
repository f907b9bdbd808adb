"""The number of threads that sessions get, and that they take no more."""

import subprocess
import sys
from pathlib import Path

import pytest

from backends.onnxruntime.parameters import SessionThreads, SharedThreads
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors
from tests.onnx_models import add_sub, save


def config(
    *counts: int, kind: InstanceKind = InstanceKind.KIND_CPU, **parameters: str
) -> ModelConfig:
    groups = tuple(InstanceGroup(kind=kind, count=count) for count in counts)
    return ModelConfig(name="m", instance_group=groups, parameters=parameters)


def test_a_single_instance_has_every_core() -> None:
    every = processors()
    assert SessionThreads.read(config(1), {}) == SessionThreads(every, every)
    assert SessionThreads.read(config(), {}) == SessionThreads(every, every)


def test_instances_of_a_model_share_the_processors() -> None:
    assert SessionThreads.read(config(processors()), {}).intra == 1
    assert SessionThreads.read(config(1, processors() * 3), {}).intra == 1
    several = SessionThreads.read(config(2), {}).intra
    assert several == max(1, processors() // 2)


def test_instances_on_a_gpu_take_no_cores() -> None:
    assert SessionThreads.read(config(4, kind=InstanceKind.KIND_GPU), {}).intra == processors()


def test_settings_of_a_model_come_before_those_of_the_backend() -> None:
    settings = {"intra_op_thread_count": "3", "inter_op_thread_count": "5"}
    assert SessionThreads.read(config(2), settings) == SessionThreads(3, 5)
    own = config(2, intra_op_thread_count="7", inter_op_thread_count="1")
    assert SessionThreads.read(own, settings) == SessionThreads(7, 1)
    zero = config(2, intra_op_thread_count="0")
    assert SessionThreads.read(zero, settings).intra == 3


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "", "99999999999"])
def test_a_number_of_threads_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        SessionThreads.read(config(intra_op_thread_count=text), {})
    assert caught.value.code is Code.INVALID_ARG
    assert "intra_op_thread_count" in caught.value.message


@pytest.mark.parametrize(
    ("threads", "expected"),
    [(1, (1, 1)), (2, (2, 1)), (3, (3, 1)), (4, (3, 2)), (8, (5, 4))],
)
def test_a_shared_pool_and_its_runs_use_the_configured_threads_together(
    threads: int, expected: tuple[int, int]
) -> None:
    shared = SharedThreads.read(
        {"enable-global-threadpool": "1", "intra_op_thread_count": str(threads)}
    )
    assert shared is not None
    assert (shared.pool, shared.runs) == expected
    assert shared.pool - 1 + shared.runs == threads


def test_without_being_asked_for_there_is_no_shared_pool() -> None:
    assert SharedThreads.read({}) is None
    assert SharedThreads.read({"enable-global-threadpool": "false"}) is None
    with pytest.raises(InferenceError, match="failed to convert 'perhaps' to boolean"):
        SharedThreads.read({"enable-global-threadpool": "perhaps"})


SCRIPT = """
import asyncio, os, sys, threading, time
from pathlib import Path
from backends.onnxruntime.backend import OnnxRuntimeBackend
from tests.tensor_backends import context
from gateway.config import ModelConfig

def threads():
    # A thread that ends is counted by the system a moment longer than by Python.
    counts = [None] * 10
    while len(set(counts)) > 1 or None in counts:
        time.sleep(0.02)
        found = len(os.listdir("/proc/self/task")) - threading.active_count()
        counts = [*counts[1:], found]
    return counts[0]

async def main(folder, settings, count):
    backend = OnnxRuntimeBackend()
    backend.settings = dict(pair.split("=") for pair in settings.split(","))
    config = backend.complete(ModelConfig(name="m"), folder)
    before = threads()
    loaded = [await backend.load(context(config, folder)) for _ in range(int(count))]
    print(threads() - before)
    for instance in loaded:
        await instance.close()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""
"""Prints the threads that the runtime starts; the one that each instance runs on is Python's."""


def threads_of(folder: Path, settings: str, instances: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), settings, str(instances)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
@pytest.mark.parametrize(
    ("settings", "instances", "expected"),
    [
        ("intra_op_thread_count=1", 2, 0),
        ("intra_op_thread_count=3", 2, 4),
        ("enable-global-threadpool=1,intra_op_thread_count=3", 1, 2),
        ("enable-global-threadpool=1,intra_op_thread_count=3", 3, 2),
        ("enable-global-threadpool=1,intra_op_thread_count=4", 3, 2),
        ("enable-global-threadpool=1,intra_op_thread_count=1", 2, 0),
    ],
)
def test_sessions_start_as_many_threads_as_configured(
    folder: Path, settings: str, instances: int, expected: int
) -> None:
    assert threads_of(save(add_sub(), folder), settings, instances) == expected
