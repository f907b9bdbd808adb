"""An execution on a thread of its own: gathered, run, scattered, or failed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from gateway.backend import Answer
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.tensor import Datatype, Tensor, array_tensor
from gateway.tensor_runtime.instance import TensorInstance
from tests.builders import WAIT_SECS, soon
from tests.conftest import tasks_left

CONFIG = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(ModelInput(name="X", data_type=DataType.TYPE_FP32, dims=(1,)),),
    output=tuple(
        ModelOutput(name=name, data_type=DataType.TYPE_FP32, dims=(1,)) for name in ("Y", "Z")
    ),
)

Compute = Callable[[np.ndarray], np.ndarray]


class Runtime(TensorInstance):
    """Y and Z are what a function makes of X; counts its runs, and notices what is asked of it."""

    def __init__(self, compute: Compute = lambda x: x, config: ModelConfig = CONFIG) -> None:
        super().__init__(config, "runtime")
        self._compute = compute
        self.batches: list[list[float]] = []
        self.asked: list[tuple[str, ...]] = []
        self.threads: list[str] = []
        self.aborted = threading.Event()
        self.released_on = ""

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        array = inputs["X"].array()
        self.batches.append(array.reshape(-1).tolist())
        self.asked.append(tuple(outputs))
        self.threads.append(threading.current_thread().name)
        return {name: array_tensor(name, Datatype.FP32, self._compute(array)) for name in outputs}

    def abort(self) -> None:
        self.aborted.set()

    def release(self) -> None:
        self.released_on = threading.current_thread().name


@asynccontextmanager
async def closing(runtime: Runtime) -> AsyncIterator[Runtime]:
    try:
        yield runtime
    finally:
        await soon(runtime.close())
    assert tasks_left() == []


def request(*values: float, outputs: tuple[str, ...] = ()) -> InferRequest:
    data = np.array(values, dtype=np.float32).reshape(-1, 1)
    return InferRequest(
        model="m",
        inputs=(array_tensor("X", Datatype.FP32, data),),
        outputs=tuple(RequestedOutput(name) for name in outputs),
    )


async def answers(runtime: Runtime, *requests: InferRequest) -> list[Answer]:
    async with aclosing(runtime.execute(requests)) as found:
        return await soon(collect(found))


async def collect(found: AsyncIterator[Answer]) -> list[Answer]:
    return [answer async for answer in found]


def values(answer: Answer) -> dict[str, list[float]]:
    response = answer[1]
    assert isinstance(response, InferResponse)
    return {output.name: output.array().reshape(-1).tolist() for output in response.outputs}


async def test_several_requests_are_one_run() -> None:
    async with closing(Runtime(lambda x: x * 2)) as runtime:
        found = await answers(runtime, request(1), request(2, 3))
    assert runtime.batches == [[1, 2, 3]]
    assert [index for index, _ in found] == [0, 1]
    assert [values(each)["Y"] for each in found] == [[2], [4, 6]]
    assert all(isinstance(each, InferResponse) and each.final for _, each in found)


async def test_only_requested_outputs_are_computed() -> None:
    async with closing(Runtime()) as runtime:
        (answer,) = await answers(runtime, request(1, outputs=("Z",)))
    assert runtime.asked == [("Z",)]
    assert values(answer) == {"Z": [1]}


async def test_each_response_has_the_phases_of_its_execution() -> None:
    def take_a_while(x: np.ndarray) -> np.ndarray:
        threading.Event().wait(0.02)
        return x

    async with closing(Runtime(take_a_while)) as runtime:
        found = await answers(runtime, request(1), request(2))
    phases = [each.phases for _, each in found if isinstance(each, InferResponse)]
    assert phases[0] is not None
    assert phases[0] == phases[1]
    assert phases[0].infer_ns >= 20_000_000
    assert phases[0].input_ns > 0
    assert phases[0].output_ns > 0


async def test_a_model_that_does_not_batch_runs_each_request_alone() -> None:
    async with closing(Runtime(config=replace(CONFIG, max_batch_size=0))) as runtime:
        found = await answers(runtime, alone(1), alone(2))
    assert runtime.batches == [[1], [2]]
    assert [values(each)["Y"] for each in found] == [[1], [2]]


def alone(value: float) -> InferRequest:
    data = np.array([value], dtype=np.float32)
    return InferRequest(model="m", inputs=(array_tensor("X", Datatype.FP32, data),))


# Failures.


async def test_a_failure_of_the_runtime_fails_every_request() -> None:
    def fail(x: np.ndarray) -> np.ndarray:
        raise InferenceError(Code.INTERNAL, "out of memory")

    async with closing(Runtime(fail)) as runtime:
        found = await answers(runtime, request(1), request(2))
        with pytest.raises(InferenceError, match="out of memory"):
            await answers(runtime, request(3))
    assert [str(error) for _, error in found] == ["out of memory"] * 2
    assert runtime.batches == [[1, 2], [1], [2], [3]]


async def test_an_exception_of_a_runtime_is_raised_unchanged() -> None:
    def fail(x: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("a defect")

    async with closing(Runtime(fail)) as runtime:
        with pytest.raises(ZeroDivisionError, match="a defect"):
            await answers(runtime, request(1))
        with pytest.raises(ZeroDivisionError, match="a defect"):
            await answers(runtime, request(2))


@pytest.mark.parametrize("code", [Code.INVALID_ARG, Code.INTERNAL])
async def test_bad_data_of_one_request_does_not_affect_its_batch(
    code: Code, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(x: np.ndarray) -> np.ndarray:
        if (x < 0).any():
            raise InferenceError(code, "negative")
        return x

    async with closing(Runtime(refuse)) as runtime:
        found = await answers(runtime, *map(request, (1, -1, 2, 3)))
    assert [index for index, _ in found] == [0, 1, 2, 3]
    assert [values(found[index])["Y"] for index in (0, 2, 3)] == [[1], [2], [3]]
    assert isinstance(found[1][1], InferenceError)
    assert found[1][1].message == "negative"
    assert runtime.batches == [[1, -1, 2, 3], [1, -1], [1], [-1], [2, 3]]
    assert [each.message for each in caplog.records] == ["batch failed, halves retried"]


async def test_an_output_that_does_not_divide_over_the_batch_is_an_error() -> None:
    async with closing(Runtime(lambda x: x[:0])) as runtime:
        found = await answers(runtime, request(1), request(2))
    for _, error in found:
        assert isinstance(error, InferenceError)
        assert "shape [0,1], expected shape [1,1]" in error.message


# Cancelling and closing.


async def test_leaving_an_execution_asks_the_runtime_to_stop() -> None:
    began, gate = threading.Event(), threading.Event()

    def hold(x: np.ndarray) -> np.ndarray:
        began.set()
        gate.wait(WAIT_SECS)
        return x

    async with closing(Runtime(hold)) as runtime:
        task = asyncio.create_task(answers(runtime, request(1)))
        await asyncio.to_thread(began.wait, WAIT_SECS)
        task.cancel()
        await soon(asyncio.wait([task]))
        assert runtime.aborted.is_set()
        gate.set()
        assert values((await answers(runtime, request(2)))[0])["Y"] == [2]


async def test_a_cancelled_execution_is_not_retried() -> None:
    began, gate = threading.Event(), threading.Event()

    def hold_and_fail(x: np.ndarray) -> np.ndarray:
        began.set()
        gate.wait(WAIT_SECS)
        raise InferenceError(Code.INTERNAL, "cut short")

    async with closing(Runtime(hold_and_fail)) as runtime:
        task = asyncio.create_task(answers(runtime, request(1), request(2)))
        await asyncio.to_thread(began.wait, WAIT_SECS)
        task.cancel()
        await soon(asyncio.wait([task]))
        later = asyncio.create_task(answers(runtime, request(3), request(4)))
        await asyncio.sleep(0)
        gate.set()
        await soon(later)
    assert runtime.batches == [[1, 2], [3, 4], [3], [4]]


async def test_an_execution_that_has_not_begun_is_not_run_at_all() -> None:
    gate = threading.Event()

    def hold(x: np.ndarray) -> np.ndarray:
        gate.wait(WAIT_SECS)
        return x

    async with closing(Runtime(hold)) as runtime:
        tasks = [asyncio.create_task(answers(runtime, request(n))) for n in (1, 2, 3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await soon(asyncio.wait([tasks[1]]))
        gate.set()
        await soon(asyncio.wait(tasks))
    assert runtime.batches == [[1], [3]]


async def test_an_execution_that_ended_well_is_not_aborted() -> None:
    async with closing(Runtime()) as runtime:
        await answers(runtime, request(1))
    assert not runtime.aborted.is_set()


async def test_closing_waits_for_the_last_run_and_releases_on_its_thread() -> None:
    runtime = Runtime()
    (thread,) = [each for each in threading.enumerate() if each.name == "runtime"]
    task = asyncio.create_task(answers(runtime, request(1)))
    await asyncio.sleep(0)
    await soon(runtime.close())
    assert runtime.batches == [[1]]
    assert runtime.released_on == "runtime"
    assert values((await soon(task))[0])["Y"] == [1]
    await asyncio.to_thread(thread.join, WAIT_SECS)
    assert not thread.is_alive()
