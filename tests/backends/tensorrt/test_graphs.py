"""CUDA graphs: for which shapes they are captured, and which executions they serve."""

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.tensorrt.engines import Range
from backends.tensorrt.graphs import Capture, captures, find
from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.config.optimization import (
    CudaOptions,
    GraphLowerBound,
    GraphShape,
    GraphSpec,
    OptimizationPolicy,
)
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from tests.backends.tensorrt.conftest import NEGATE, Load, M, X, Y, ask, on, refused, request
from tests.backends.tensorrt.stand_in.stand_in_plans import Plan, PlannedTensor
from tests.builders import WAIT_SECS

PROFILE = {"x": Range((1, 4), (4, 4), (8, 4))}
OUT_OF_MEMORY, CAPTURE_FAILED = 2, 900
Call = Callable[[], None]


def wanting(*specs: GraphSpec, config: ModelConfig = M, **fields: Any) -> ModelConfig:
    policy = OptimizationPolicy(cuda=CudaOptions(graphs=True, graph_spec=specs))
    return replace(config, optimization=policy, **fields)


def spec(rows: int, least: int = 0, **dims: Sequence[int]) -> GraphSpec:
    shapes: Mapping[str, GraphShape] = {n: GraphShape(dim=tuple(d)) for n, d in dims.items()}
    bound = GraphLowerBound(batch_size=least, input=shapes) if least else None
    return GraphSpec(batch_size=rows, input=shapes, graph_lower_bound=bound)


# Which ones.


@pytest.mark.parametrize(
    ("size", "batching", "rows"),
    [
        (8, DynamicBatching(preferred_batch_size=(4,)), [1, 4, 8]),
        (8, None, [1, 2, 3, 4, 6, 8]),
        (20, None, [1, 2, 3, 4, 6, 8, 12, 16, 20]),
    ],
)
def test_the_default_sizes_are_tritons(
    size: int, batching: DynamicBatching | None, rows: list[int]
) -> None:
    config = wanting(max_batch_size=size, dynamic_batching=batching)
    assert [each.shapes for each in captures(config, PROFILE)] == [{"x": (n, 4)} for n in rows]


def test_a_model_without_batches_has_the_best_shapes_of_its_profile() -> None:
    assert captures(wanting(), PROFILE) == [Capture({"x": (4, 4)})]


def test_nothing_is_captured_unless_the_config_asks() -> None:
    assert captures(replace(M, max_batch_size=8), PROFILE) == []


def test_a_graph_serves_its_own_shapes_and_fewer_rows_down_to_its_bound() -> None:
    exact, bounded = Capture({"x": (2, 4)}), Capture({"x": (8, 4)}, 4)
    both = [bounded, exact]
    assert find(both, {"x": (2, 4)}) is exact
    assert find(both, {"x": (3, 4)}) is None
    assert find(both, {"x": (4, 4)}) is bounded
    assert find(both, {"x": (8, 4)}) is bounded
    assert find(both, {"x": (9, 4)}) is None
    assert find(both, {"x": (8, 5)}) is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (spec(9), "graph spec expects 'batch_size' to be >= 1 and <= 8"),
        (spec(0), "graph spec expects 'batch_size' to be >= 1 and <= 8"),
        (
            spec(2, 4, x=[4]),
            "graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'",
        ),
        (spec(2, x=[-4]), "graph spec expects input 'x' to have dimension >= 0"),
        (
            spec(2, z=[4]),
            "graph spec names 'z', expected a shape for each input of the engine, and for 'x'",
        ),
        (
            replace(spec(2, x=[4]), graph_lower_bound=GraphLowerBound(batch_size=1)),
            "graph lower bound spec expects shape for input 'x'",
        ),
    ],
)
def test_specs_that_cannot_be_are_refused_in_tritons_words(wrong: GraphSpec, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        captures(wanting(wrong, max_batch_size=8), PROFILE)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == f"model 'm': {text}"


def test_a_bound_on_other_dims_than_the_batch_is_refused() -> None:
    least = GraphLowerBound(batch_size=2, input={"x": GraphShape(dim=(1,))})
    wrong = replace(spec(2, x=[4]), graph_lower_bound=least)
    with pytest.raises(InferenceError) as caught:
        captures(wanting(wrong, max_batch_size=8), PROFILE)
    assert caught.value.code is Code.UNSUPPORTED


# What they do.


def rows(*values: float) -> list[list[float]]:
    return [[value] * 4 for value in values]


async def test_executions_of_captured_shapes_are_launched(load: Load, world: Any) -> None:
    instance = await load(NEGATE, wanting(spec(2), spec(4)))
    assert world.counts["executable graph"] == 2
    assert world.counts["context"] == 3
    for values, launches in (([1, 2], 1), ([3], 1), ([5, 6, 7, 8], 2), ([9, 10], 3)):
        found = await ask(instance, request(x=rows(*values)))
        assert found == [{"y": rows(*(-each for each in values))}]
        assert world.calls["cudaGraphLaunch"] == launches


async def test_a_smaller_batch_is_filled_up_with_zeros_and_cut_again(
    load: Load, world: Any
) -> None:
    indices = PlannedTensor(name="x", dims=(-1, 1), type="INT32")
    found = replace(indices, name="y", operation="lookup", of=("x",))
    plan = Plan(tensors=(indices, found), profiles=({"x": ([1, 1], [4, 1], [8, 1])},))
    instance = await load(plan, wanting(spec(8, 1, x=[1])))
    sent = [request(x=np.array([[each]], np.int32)) for each in (3, 1, 2)]
    assert await ask(instance, *sent) == [{"y": [[13]]}, {"y": [[11]]}, {"y": [[12]]}]
    assert await ask(instance, sent[0]) == [{"y": [[13]]}]
    assert world.calls["cudaGraphLaunch"] == 2


async def test_larger_executions_do_not_move_the_memory_of_graphs(load: Load, world: Any) -> None:
    wide = Plan(
        tensors=(replace(X, dims=(-1, 400)), replace(Y, dims=(-1, 400))),
        profiles=({"x": ([1, 400], [4, 400], [8, 400])},),
    )
    instance = await load(wide, wanting(spec(1)))
    await ask(instance, request(x=np.ones((8, 400), np.float32)))
    assert await ask(instance, request(x=[[2.0] * 400])) == [{"y": [[-2.0] * 400]}]
    assert world.calls["cudaGraphLaunch"] == 1


async def test_a_graph_whose_tensors_have_moved_is_not_launched(load: Load, world: Any) -> None:
    plan = replace(NEGATE, tensors=(X, replace(Y, dims=(-1,), operation="share")))
    unbatched = (ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(-1, 4)),)
    instance = await load(plan, wanting(input=unbatched))
    sent = request(x=rows(1, 2, 3, 4))
    assert await ask(instance, sent) == [{"y": [*range(250)]}]
    assert await ask(instance, request(x=rows(1))) == [{"y": [*range(1000)]}]
    assert await ask(instance, sent) == [{"y": [*range(250)]}]
    assert world.calls["cudaGraphLaunch"] == 1


async def test_each_profile_has_graphs_of_the_shapes_it_allows(load: Load, world: Any) -> None:
    plan = replace(NEGATE, profiles=(PROFILE_TO_8, {"x": ([9, 4], [16, 4], [16, 4])}))
    instance = await load(plan, wanting(spec(8), spec(16), config=on(M, profile=("0", "1"))))
    assert world.counts["executable graph"] == 2
    many = list(range(16))
    assert await ask(instance, request(x=rows(*many))) == [{"y": rows(*(-n for n in many))}]
    assert world.calls["cudaGraphLaunch"] == 1


PROFILE_TO_8 = {"x": ([1, 4], [4, 4], [8, 4])}


async def test_a_model_serves_without_a_graph_that_cannot_be_captured(
    load: Load, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.refuse("cudaGraphInstantiate", CAPTURE_FAILED)
    instance = await load(NEGATE, wanting(spec(1), spec(2)))
    assert "not captured" in caplog.text
    assert world.counts["executable graph"] == 1
    assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]
    assert world.calls["cudaGraphLaunch"] == 0
    assert await ask(instance, request(x=rows(1, 2))) == [{"y": rows(-1, -2)}]
    assert world.calls["cudaGraphLaunch"] == 1


async def test_an_execution_that_cannot_be_captured_is_executed(
    load: Load, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    instance = await load(replace(NEGATE, extra={"not_captured": True}), wanting(spec(1)))
    assert "not captured" in caplog.text
    assert world.counts["graph"] == world.counts["executable graph"] == 0
    assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]


async def test_sizes_that_depend_on_values_are_not_captured(
    load: Load, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = replace(X, dims=(4,)), replace(Y, dims=(-1,), operation="nonzero", type="INT64")
    instance = await load(Plan(tensors=(x, y)), wanting())
    assert "not captured" in caplog.text
    assert world.counts["executable graph"] == 0
    assert await ask(instance, request(x=[0, 1, 0, 1])) == [{"y": [1, 3]}]


# Captures at the same time as other calls.


@pytest.fixture
def call_during_capture(world: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Call], None]:
    """Calls on the event loop or on the loading thread during a capture."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    begin = runtime.cudaStreamBeginCapture

    def have_done(call: Call) -> None:
        def begin_and_do(stream: Any, mode: Any) -> Any:
            found = begin(stream, mode)
            call()
            return found

        monkeypatch.setattr(runtime, "cudaStreamBeginCapture", begin_and_do)

    return have_done


async def test_a_failure_while_another_model_captures_disturbs_neither(
    load: Load,
    world: Any,
    call_during_capture: Callable[[Call], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, loop = await load(NEGATE), asyncio.get_running_loop()

    def fail() -> None:
        world.refuse("cudaMallocAsync", OUT_OF_MEMORY)
        failing = refused(ask(first, request(x=rows(1))), Code.UNAVAILABLE)
        messages.append(asyncio.run_coroutine_threadsafe(failing, loop).result(WAIT_SECS))

    messages: list[str] = []
    call_during_capture(fail)
    second = await load(NEGATE, wanting(spec(1)))
    assert [each.partition(" (")[0] for each in messages] == ["model 'm' is out of memory on GPU 0"]
    assert "not captured" not in caplog.text
    for instance in (first, second):
        assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]
    assert world.calls["cudaGraphLaunch"] == 1


async def test_a_graph_that_others_in_the_process_spoil_is_done_without(
    load: Load,
    world: Any,
    call_during_capture: Callable[[Call], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = importlib.import_module("cuda.bindings.runtime")
    statuses: list[int] = []
    call_during_capture(lambda: statuses.append(int(runtime.cudaDeviceSynchronize()[0])))
    instance = await load(NEGATE, wanting(spec(1)))
    assert statuses == [CAPTURE_FAILED]
    assert "not captured" in caplog.text
    assert await ask(instance, request(x=rows(1))) == [{"y": rows(-1)}]
    assert world.calls["cudaGraphLaunch"] == 0
