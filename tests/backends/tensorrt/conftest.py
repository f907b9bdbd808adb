"""Plans that a test loads on stand-ins for TensorRT and CUDA; every leak fails the test."""

import gc
import importlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.tensorrt.backend import TensorRtBackend
from gateway.backend import Answer, Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.models.reshaped_instance import with_reshapes
from gateway.tensor import Datatype, array_tensor
from tests import tensor_backends
from tests.backends.tensorrt.stand_in.stand_in_plans import Plan, PlannedTensor
from tests.builders import soon

FREED_SECS = 5.0
"""The thread of a call holds it a moment longer than the call's caller waits."""
STAND_IN = Path(__file__).parent / "stand_in"
STOOD_IN = ("cuda", "stand_in_plans", "tensorrt", "tensorrt_lean", "tensorrt_dispatch")
GPU = InstanceGroup(name="m", kind=InstanceKind.KIND_GPU, count=1, gpus=(0,))
M = ModelConfig(name="m", backend="tensorrt", instance_group=(GPU,))
Load = Callable[..., Awaitable[Instance]]

X = PlannedTensor(name="x", dims=(-1, 4))
Y = PlannedTensor(name="y", dims=(-1, 4), operation="negate", of=("x",))
UP_TO_8 = {"x": ([1, 4], [4, 4], [8, 4])}
NEGATE = Plan(tensors=(X, Y), profiles=(UP_TO_8,))
"""y = -x in batches of at most 8."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The importable stand-ins; at the end everything must be freed."""
    for name in _stood_in():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(STAND_IN)
    found = importlib.import_module("cuda.bindings.world").world
    yield found
    ends_at = time.monotonic() + FREED_SECS
    while found.leaks and time.monotonic() < ends_at:
        time.sleep(0.01)
        gc.collect()
    for name in _stood_in():
        del sys.modules[name]
    assert found.leaks == {}


def _stood_in() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in STOOD_IN]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    return tensor_backends.version_folder(tmp_path)


@pytest.fixture
def backend(world: Any) -> TensorRtBackend:
    """The backend, on the stand-ins."""
    return TensorRtBackend()


def save(plan: Plan | bytes, folder: Path, name: str = "model.plan") -> Path:
    """Write a plan."""
    path = folder / name
    data = plan if isinstance(plan, bytes) else plan.to_bytes()
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)
    return path


def context(config: ModelConfig, folder: Path, number: int = 0, device: int = 0) -> ModelContext:
    """The context to load an instance."""
    made = tensor_backends.context(config, folder, config.instance_group[0])
    return replace(made, name=f"{config.name}_{number}", device=device)


@pytest.fixture
async def load(backend: TensorRtBackend, folder: Path) -> AsyncIterator[Load]:
    """Write a plan, complete its config, load it; closed when the test ends."""
    loaded: list[Instance] = []

    async def make(plan: Plan | bytes, config: ModelConfig = M, device: int = 0) -> Instance:
        save(plan, folder)
        whole = backend.complete(config, folder)
        instance = await soon(backend.load(context(whole, folder, len(loaded), device)))
        loaded.append(with_reshapes(instance, whole))
        return loaded[-1]

    yield make
    for instance in loaded:
        await soon(instance.close())


def request(outputs: Sequence[str] = (), **values: Any) -> InferRequest:
    """A request for arrays; lists are FP32."""
    arrays = {
        name: each if isinstance(each, np.ndarray) else np.asarray(each, dtype=np.float32)
        for name, each in values.items()
    }
    return InferRequest(
        model="m",
        inputs=tuple(array_tensor(n, datatype_of(each), each) for n, each in arrays.items()),
        outputs=tuple(RequestedOutput(name) for name in outputs),
    )


def datatype_of(array: np.ndarray[Any, Any]) -> Datatype:
    """The datatype of an array's numbers."""
    names = {"float": "FP", "int": "INT", "uint": "UINT", "bool": "BOOL"}
    kind = array.dtype.name.rstrip("0123456789")
    return Datatype(names[kind] + array.dtype.name[len(kind) :])


async def answers(instance: Instance, *requests: InferRequest) -> list[Answer]:
    """All answers of one execution."""

    async def collect() -> list[Answer]:
        async with aclosing(instance.execute(requests)) as found:
            return [answer async for answer in found]

    return await soon(collect())


async def ask(instance: Instance, *requests: InferRequest) -> list[Mapping[str, Any]]:
    """The outputs of each request by name, as lists."""
    found = sorted(await answers(instance, *requests), key=lambda answer: answer[0])
    return [_outputs(response) for _, response in found]


def _outputs(response: object) -> Mapping[str, Any]:
    assert isinstance(response, InferResponse), response
    return {output.name: output.array().tolist() for output in response.outputs}


async def refused(work: Awaitable[Any], code: Code) -> str:
    """The text of the InferenceError that the work raises."""
    with pytest.raises(InferenceError) as caught:
        await soon(work)
    assert caught.value.code is code
    return caught.value.message


def on(config: ModelConfig, **fields: Any) -> ModelConfig:
    """The config with its instance group changed."""
    return replace(config, instance_group=(replace(config.instance_group[0], **fields),))
