"""Failed, terminated and waiting executions of ONNX models."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from backends.onnxruntime.backend import OnnxRuntimeBackend
from backends.onnxruntime.instance import OnnxRuntimeInstance
from backends.onnxruntime.parameters import SessionThreads
from backends.onnxruntime.session import SessionPlan, open_session
from gateway.config import (
    ModelConfig,
)
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, Tensor
from tests.backends.onnxruntime.conftest import x_and_y
from tests.builders import soon
from tests.onnx_models import add_sub, constant, model, node, one, save, tensor
from tests.tensor_backends import Load, answers, ask, context, floats, request


async def test_an_operator_that_fails_fails_the_request_and_no_later_one(load: Load) -> None:
    made = model(
        [node("Add", "x z", "y", name="/layer/Add")],
        [tensor("x", ["b", "s"]), tensor("z", ["b", "t"])],
        [tensor("y", ["b", "u"])],
    )
    instance = await load(made)
    with pytest.raises(InferenceError) as caught:
        await answers(instance, floats(x=np.ones((1, 2)), z=np.ones((1, 3))))
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == (
        "model 'm' failed: onnx runtime error 1: Non-zero status code returned while running Add "
        "node. Name:'/layer/Add' Status Message: axis == 1 || axis == largest was false. "
        "Attempting to broadcast an axis by a dimension other than 1. 2 by 3"
    )
    assert await ask(instance, floats(x=[[1]], z=[[2]])) == [{"y": [[3]]}]


async def test_an_index_out_of_bounds_fails_its_request_and_not_its_batch(load: Load) -> None:
    made = model(
        [node("Gather", "table x", "y")],
        [tensor("x", ["b", "s"], TensorProto.INT64)],
        [tensor("y", ["b", "s"])],
        [constant("table", np.array([10, 20], dtype=np.float32))],
    )
    instance = await load(made)
    requests = [request({"x": [[index]]}, Datatype.INT64) for index in (1, 10**9, 0)]
    first, bad, last = [response for _, response in await answers(instance, *requests)]
    for response, expected in ((first, 20), (last, 10)):
        assert isinstance(response, InferResponse)
        assert response.outputs[0].array().tolist() == [[expected]]
    assert isinstance(bad, InferenceError)
    assert "indices element out of data bounds, idx=1000000000" in bad.message


async def test_nonzero_booleans_are_true_and_count_once(load: Load) -> None:
    made = model(
        [node("Compress", "x c", "y", axis=0)],
        [tensor("x", [4]), tensor("c", [4], TensorProto.BOOL)],
        [tensor("y", ["n"])],
    )
    condition = Tensor("c", Datatype.BOOL, (4,), b"\xff\x00\x02\x01")
    inputs = (*floats(x=[1, 2, 3, 4]).inputs, condition)
    assert await ask(await load(made), InferRequest(model="m", inputs=inputs)) == [{"y": [1, 3, 4]}]


async def test_a_shape_that_the_model_refuses_is_reported(load: Load) -> None:
    instance = await load(one("Neg", ("b", 4)), x_and_y())
    with pytest.raises(InferenceError) as caught:
        await answers(instance, floats(x=[[1, 2]]))
    assert caught.value.code is Code.INTERNAL
    assert "onnx runtime error 2: Got invalid dimensions for input: x" in caught.value.message
    assert "index: 1 Got: 2 Expected: 4" in caught.value.message


async def test_an_output_that_contradicts_the_config_is_reported(load: Load) -> None:
    made = model(
        [node("Concat", "x x", "y", axis=1)],
        [tensor("x", ["b", "s"])],
        [tensor("y", ["b", "t"])],
    )
    config = x_and_y((2,))
    instance = await load(made, config)
    with pytest.raises(InferenceError, match=r"shape \[1,4\], expected shape \[1,2\]"):
        await answers(instance, floats(x=[[1, 2]]))


async def test_an_optional_input_that_the_model_needs_is_missed_by_name(load: Load) -> None:
    config = replace(x_and_y((1,)), max_batch_size=0)
    made = model([node("Neg", "x", "y")], [tensor("x", [1])], [tensor("y", [1])])
    instance = await load(made, replace(config, input=(replace(config.input[0], optional=True),)))
    with pytest.raises(InferenceError) as caught:
        await answers(instance, InferRequest(model="m"))
    assert "Required inputs (['x']) are missing" in caught.value.message


# Leaving, and waiting for a turn.


def endless() -> Any:
    """A model that computes for a minute or so, in one operator after the other."""
    nodes = [node("MatMul", f"t{n} x", f"t{n + 1}") for n in range(2000)]
    return model(
        [node("Identity", "x", "t0"), *nodes, node("Identity", "t2000", "y")],
        [tensor("x", ["s", "s"])],
        [tensor("y", ["s", "s"])],
    )


async def test_a_run_without_waiting_clients_is_terminated(load: Load) -> None:
    config = replace(x_and_y((-1, -1)), max_batch_size=0)
    instance = await load(endless(), config)
    big = floats(x=np.zeros((600, 600)))
    task = asyncio.create_task(answers(instance, big))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0.3)
    assert await ask(instance, floats(x=[[0]])) == [{"y": [[0]]}]


async def test_sessions_of_a_shared_pool_run_in_turn(folder: Path) -> None:
    config = OnnxRuntimeBackend().complete(ModelConfig(name="m"), save(add_sub(), folder))
    plan = SessionPlan("m_0", SessionThreads(1, 1), [("CPUExecutionProvider", {})])
    turns = threading.Semaphore(1)
    instances = [
        OnnxRuntimeInstance(context(config, folder), open_session(config, folder, plan), turns)
        for _ in range(3)
    ]
    turns.acquire()
    ones = floats(INPUT0=np.ones((1, 16)), INPUT1=np.ones((1, 16)))
    waiting = [asyncio.create_task(answers(each, ones)) for each in instances]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert done == set()
    turns.release()
    assert len(await soon(asyncio.gather(*waiting))) == 3
    for each in instances:
        await soon(each.close())
