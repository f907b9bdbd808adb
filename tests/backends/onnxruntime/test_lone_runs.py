"""Runs that are alone: when they take all cores, and that the answers are the same."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.onnxruntime import parameters
from backends.onnxruntime.backend import OnnxRuntimeBackend
from backends.onnxruntime.lone_runs import (
    OWN_RUNS,
    RECENT_RUNS,
    SHORT_NS,
    TRIALS,
    WIDE_RUNS,
    ActiveRuns,
    LoneRuns,
    SizeClass,
)
from backends.onnxruntime.parameters import SessionThreads
from backends.onnxruntime.session import SessionPlan, open_session
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS
from gateway.tensor_runtime import parameters as shared_parameters
from tests.backends.onnxruntime.conftest import x_and_y
from tests.builders import soon
from tests.onnx_models import constant, model, node, save, tensor
from tests.tensor_backends import ask, context, floats

CORES = 2
Opened = list[tuple[SessionPlan, weakref.ref[Any]]]
MS = 1_000_000


def choices(runs: int, known: SizeClass, own_ns: int, wide_ns: int) -> list[bool]:
    """The sessions of the next runs, which take these times for one element."""
    found = []
    for _ in range(runs):
        found.append(known.is_wide)
        known.took(wide_ns if found[-1] else own_ns, 1)
    return found


@pytest.mark.parametrize(("wide_ns", "expected"), [(8 * MS, True), (95 * MS // 10, False)])
def test_trials_in_turn_choose_the_session_that_is_clearly_faster(
    wide_ns: int, expected: bool
) -> None:
    known = SizeClass()
    assert choices(2 * TRIALS, known, 10 * MS, wide_ns) == [False, True] * TRIALS
    kept = WIDE_RUNS if expected else OWN_RUNS
    assert set(choices(kept, known, 10 * MS, wide_ns)) == {expected}
    assert choices(2 * TRIALS, known, 10 * MS, 20 * MS) == [False, True] * TRIALS
    assert not known.is_wide


def test_times_are_compared_by_element() -> None:
    known = SizeClass()
    for _ in range(TRIALS):
        known.took(10 * MS, 100)
        known.took(12 * MS, 190)
    assert known.is_wide


def test_short_runs_are_never_tried_with_all_cores() -> None:
    assert not any(choices(3 * OWN_RUNS, SizeClass(), SHORT_NS, 1))


class Runs:
    """Runs of one model by hand; each says which session it took."""

    def __init__(self) -> None:
        self.active = ActiveRuns()
        self.lone = LoneRuns("m", None, None, self.active)
        known = self.lone.size_class(1)
        choices(2 * TRIALS, known, 10 * MS, MS)

    def one(self, *, is_overtaken: bool = False) -> str:
        """Another run begins meanwhile if it `is_overtaken`."""

        def compute(session: str) -> str:
            if is_overtaken:
                with self.active:
                    assert self.lone.compute(lambda: "own", lambda: "wide", 1) == "own"
            return session

        with self.active:
            return self.lone.compute(lambda: compute("own"), lambda: compute("wide"), 1)


def test_a_run_takes_all_cores_unless_another_runs() -> None:
    runs = Runs()
    assert runs.one() == "wide"
    with runs.active:
        assert runs.one() == "own"
    assert runs.one() == "wide"


def test_no_run_takes_all_cores_while_lone_runs_are_usually_overtaken() -> None:
    runs = Runs()
    first = [runs.one(is_overtaken=True) for _ in range(RECENT_RUNS)]
    assert (first[0], first[-1]) == ("wide", "own")
    assert [runs.one() for _ in range(RECENT_RUNS)][-1] == "wide"


def test_larger_inputs_take_all_cores_without_trials_once_smaller_ones_do() -> None:
    lone = LoneRuns("m", None, None, ActiveRuns())
    small, middle, large = (lone.size_class(size) for size in (8, 64, 512))
    choices(2 * TRIALS, large, 10 * MS, 20 * MS)
    choices(2 * TRIALS, middle, 10 * MS, MS)
    assert [lone.size_class(size).is_wide for size in (8, 64, 128, 512)] == [
        False,
        True,
        True,
        False,
    ]
    assert not small.is_settled


# Sessions of a loaded model.


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The plans of the sessions that are opened on a machine of CORES cores, and the sessions."""
    found: Opened = []

    def record(config: ModelConfig, folder: Path, plan: SessionPlan) -> Any:
        session = open_session(config, folder, plan)
        found.append((plan, weakref.ref(session)))
        return session

    for module in (parameters, shared_parameters):
        monkeypatch.setattr(module, "processors", lambda: CORES)
    monkeypatch.setattr("backends.onnxruntime.backend.open_session", record)
    return found


def dense(folder: Path) -> Path:
    """y = x @ w, for sizes that threads share."""
    weights = constant("w", np.linspace(-1, 1, 512 * 512, dtype=np.float32).reshape(512, 512))
    made = model(
        [node("MatMul", "x w", "y")],
        [tensor("x", ["b", 512])],
        [tensor("y", ["b", 512])],
        [weights],
    )
    return save(made, folder)


PAIR = InstanceGroup(name="m", kind=InstanceKind.KIND_CPU, count=2)


def config(**fields: Any) -> ModelConfig:
    return x_and_y((512,), instance_group=(PAIR,), **fields)


async def load(
    folder: Path, wanted: ModelConfig, settings: Mapping[str, str] = NO_PARAMETERS
) -> Sequence[Any]:
    """Two instances of the model."""
    runtime = OnnxRuntimeBackend()
    runtime.settings = settings
    return [await soon(runtime.load(context(wanted, folder, PAIR))) for _ in range(2)]


async def close(instances: Sequence[Any]) -> None:
    for each in instances:
        await soon(each.close())


async def test_instances_of_one_thread_share_two_sessions_until_both_are_closed(
    folder: Path,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backends.onnxruntime.lone_runs.SHORT_NS", 0)
    first, second = await load(dense(folder), config())
    assert [plan.threads for plan, _ in opened] == [
        SessionThreads(1, 1),
        SessionThreads(CORES, CORES),
    ]
    rows = np.linspace(0, 1, 8 * 512, dtype=np.float32).reshape(8, 512)
    found = [await ask(each, floats(x=rows)) for _ in range(TRIALS) for each in (first, second)]
    for each in found[1:]:
        np.testing.assert_allclose(each[0]["y"], found[0][0]["y"], rtol=1e-4, atol=1e-4)
    await close([first])
    assert all(session() is not None for _, session in opened)
    await close([second])
    assert all(session() is None for _, session in opened)


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        ({"all_cores_when_alone": "0"}, {}),
        ({"intra_op_thread_count": "1"}, {}),
        ({}, {"intra_op_thread_count": "1"}),
    ],
)
async def test_each_instance_has_its_own_session_only_if_threads_are_configured_or_it_is_off(
    folder: Path,
    opened: Opened,
    wanted: dict[str, str],
    settings: dict[str, str],
) -> None:
    await close(await load(dense(folder), config(parameters=wanted), settings))
    assert [plan.threads.intra for plan, _ in opened if plan.threads] == [1, 1]


async def test_a_model_is_served_without_the_session_of_all_cores(
    folder: Path, opened: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(config: ModelConfig, folder: Path, plan: SessionPlan) -> Any:
        if plan.threads == SessionThreads(CORES, CORES):
            raise InferenceError(Code.INTERNAL, "onnx runtime error 6: no memory")
        return open_session(config, folder, plan)

    monkeypatch.setattr("backends.onnxruntime.backend.open_session", fail)
    with caplog.at_level(logging.WARNING):
        instances = await load(dense(folder), config())
    assert {each.message for each in caplog.records} == {"session of all cores not opened"}
    zeros = floats(x=np.zeros((1, 512)))
    assert [await ask(each, zeros) for each in instances] == [[{"y": [[0.0] * 512]}]] * 2
    await close(instances)


async def test_an_instance_on_the_cores_of_a_host_policy_has_no_session_of_all_cores(
    folder: Path, opened: Opened
) -> None:
    placed = replace(context(config(), dense(folder), PAIR), cpu_cores=frozenset({0}))
    await close([await soon(OnnxRuntimeBackend().load(placed))])
    assert len(opened) == 1
