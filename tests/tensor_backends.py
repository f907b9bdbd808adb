"""The parts that tests of backends for tensors share: contexts, loads, requests and answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.models.reshaped_instance import with_reshapes
from gateway.tensor import Datatype, array_tensor
from tests.builders import WAIT_SECS, soon

CPU = InstanceGroup(name="m", kind=InstanceKind.KIND_CPU, count=1)
Load = Callable[..., Awaitable[Instance]]


def context(config: ModelConfig, folder: Path, group: InstanceGroup = CPU) -> ModelContext:
    """The context to load the model of a version folder."""

    def infer(_: InferRequest) -> Any:
        raise AssertionError("a tensor model sends no request")

    return ModelContext(
        config=config,
        name=f"{config.name}_0",
        group=group,
        path=folder,
        store=folder,
        infer=infer,
        wasted=lambda tokens: None,
    )


def version_folder(root: Path) -> Path:
    """The version folder of a model m."""
    made = root / "m" / "1"
    made.mkdir(parents=True)
    return made


@asynccontextmanager
async def loading(
    folder: Path,
    new_backend: Callable[[], Backend],
    save: Callable[[Any, Path], object],
    load_secs: float = WAIT_SECS,
) -> AsyncIterator[Load]:
    """A function that writes a model, completes its config and loads it; all are closed."""
    loaded: list[Instance] = []

    async def make(
        made: Any, config: ModelConfig | None = None, on: Backend | None = None
    ) -> Instance:
        if made is not None:
            save(made, folder)
        runtime = on or new_backend()
        named = replace(config or ModelConfig(), name="m")
        whole = await asyncio.to_thread(runtime.complete, named, folder)
        async with asyncio.timeout(load_secs):
            instance = await runtime.load(context(whole, folder))
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
