"""Models that a test loads by the backend, and that are closed when it ends."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.onnxruntime.backend import OnnxRuntimeBackend
from gateway.backend import Answer, Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.models.reshaped_instance import with_reshapes
from gateway.tensor import Datatype, array_tensor
from tests import onnx_models
from tests.builders import soon

CPU = InstanceGroup(name="m", kind=InstanceKind.KIND_CPU, count=1)
Load = Callable[..., Awaitable[Instance]]


def backend(**settings: str) -> OnnxRuntimeBackend:
    """The backend, with `--backend-config` where `_` stands for `-`."""
    made = OnnxRuntimeBackend()
    made.settings = {key.replace("_", "-"): value for key, value in settings.items()}
    return made


def context(config: ModelConfig, folder: Path, group: InstanceGroup = CPU) -> ModelContext:
    """The context to load the model of a version folder."""

    def infer(_: InferRequest) -> Any:
        raise AssertionError("a tensor model asks nobody")

    return ModelContext(
        config=config,
        name=f"{config.name}_0",
        group=group,
        path=folder,
        store=folder,
        infer=infer,
        wasted=lambda tokens: None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    made = tmp_path / "m" / "1"
    made.mkdir(parents=True)
    return made


@pytest.fixture
async def load(folder: Path) -> AsyncIterator[Load]:
    """Write a model, complete its config, load it; closed when the test ends."""
    loaded: list[Instance] = []

    async def make(
        made: Any, config: ModelConfig | None = None, on: OnnxRuntimeBackend | None = None
    ) -> Instance:
        if made is not None:
            onnx_models.save(made, folder)
        runtime = on or OnnxRuntimeBackend()
        whole = runtime.complete(replace(config or ModelConfig(), name="m"), folder)
        instance = await soon(runtime.load(context(whole, folder)))
        loaded.append(with_reshapes(instance, whole))
        return loaded[-1]

    yield make
    for instance in loaded:
        await soon(instance.close())


def request(
    values: Mapping[str, Any], datatype: Datatype = Datatype.FP32, outputs: Sequence[str] = ()
) -> InferRequest:
    """A request for arrays of one datatype."""
    dtype = object if datatype is Datatype.BYTES else None
    return InferRequest(
        model="m",
        inputs=tuple(
            array_tensor(name, datatype, np.asarray(value, dtype=dtype))
            for name, value in values.items()
        ),
        outputs=tuple(RequestedOutput(name) for name in outputs),
    )


def floats(**values: Any) -> InferRequest:
    """A request for arrays of FP32."""
    return request({name: np.asarray(each, dtype=np.float32) for name, each in values.items()})


async def answers(instance: Instance, *requests: InferRequest) -> list[Answer]:
    """All answers of one execution."""

    async def collect() -> list[Answer]:
        async with aclosing(instance.execute(requests)) as found:
            return [answer async for answer in found]

    return await soon(collect())


async def ask(instance: Instance, *requests: InferRequest) -> list[dict[str, Any]]:
    """The outputs of each request by name, as lists."""
    found = await answers(instance, *requests)
    return [_outputs(response) for _, response in sorted(found, key=lambda answer: answer[0])]


def _outputs(response: object) -> dict[str, Any]:
    assert isinstance(response, InferResponse), response
    return {output.name: output.array().tolist() for output in response.outputs}


def x_and_y(dims: tuple[int, ...] = (-1,), **fields: Any) -> ModelConfig:
    """A batching config of input x and output y."""
    return ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=dims),),
        output=(ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=dims),),
        **fields,
    )
