"""Python models in real workers, for tests that drive them as schedulers do."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gateway.backend import Answer, Instance, Note
from gateway.config import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, array_tensor

WAIT_SECS = 20.0
CONFIG = ModelConfig(
    name="m",
    backend="python",
    input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(-1,)),),
    output=(
        ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(-1,)),
        ModelOutput(name="z", data_type=DataType.TYPE_FP32, dims=(-1,)),
    ),
)
DECOUPLED = replace(CONFIG, model_transaction_policy=TransactionPolicy(decoupled=True))
HEAD = """
import json, os, pathlib, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

HERE = pathlib.Path(__file__).parent
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def x(request):
    return pb_utils.get_input_tensor_by_name(request, "x").as_numpy()


def response(array, name="y", **options):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)], **options)


class TritonPythonModel:
"""
Load = Callable[..., Awaitable[Instance]]


async def soon(wait: Awaitable[Any]) -> Any:
    async with asyncio.timeout(WAIT_SECS):
        return await wait


def write(tmp_path: Path, code: str) -> Path:
    """The folder of that model.py; one that is there already keeps its time."""
    file = tmp_path / "m" / "1" / "model.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != HEAD + code:
        file.write_text(HEAD + code)
    return file.parent


def no_model(request: InferRequest) -> ResponseStream:
    raise AssertionError("the model asks nobody")


def request(*values: float, **fields: Any) -> InferRequest:
    array = np.array(values, np.float32)
    return InferRequest(model="m", inputs=(array_tensor("x", Datatype.FP32, array),), **fields)


async def answers(instance: Instance, *requests: InferRequest) -> list[Answer]:
    """The responses of the requests, without the note that the instance is free."""

    async def collect() -> list[Answer]:
        found = [answer async for answer in instance.execute(requests)]
        return [answer for answer in found if answer[1] is not Note.FREED]

    return await soon(collect())


def values(answer: Answer, name: str = "y") -> list[float]:
    assert isinstance(answer[1], InferResponse), answer
    output = answer[1].output(name)
    assert output is not None
    return output.array().tolist()


class Others:
    """The other models of a server, as the model under test sees them."""

    def __init__(self, *, ready: bool = True, decoupled: bool = False) -> None:
        self.is_ready, self.is_decoupled = ready, decoupled
        self.streams: list[ResponseStream] = []
        self.requests: list[InferRequest] = []
        self.loads: list[tuple[str, str, Mapping[str, bytes]]] = []
        self.asked = asyncio.Event()

    def infer(self, request: InferRequest) -> ResponseStream:
        self.requests.append(request)
        self.streams.append(ResponseStream())
        self.asked.set()
        return self.streams[-1]

    async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        self.loads.append((name, config, files))
        if name == "bad":
            raise InferenceError(Code.INVALID_ARG, "failed to load 'bad'")

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.loads.append((name, f"unload {unload_dependents}", {}))

    def ready(self, name: str, version: str) -> bool:
        return self.is_ready

    def decoupled(self, name: str, version: str) -> bool:
        return self.is_decoupled


TWICE = """
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", x(each) * 2), pb_utils.Tensor("z", x(each) * 3)]
            )
            for each in requests
        ]
"""


ASK = """
    def execute(self, requests):
        (request,) = requests
        found = pb_utils.InferenceRequest(
            model_name="other", requested_output_names=["y"], inputs=[request.inputs()[0]],
        ).exec(decoupled=DECOUPLED)
        if not DECOUPLED:
            found = [found]
        texts = [
            each.error().message() if each.has_error()
            else str([t.as_numpy().tolist() for t in each.output_tensors()])
            for each in found
        ]
        return [response(x(request), parameters={"told": " | ".join(texts)})]
"""


async def told(instance: Instance, asked: InferRequest) -> str:
    ((_, found),) = await answers(instance, asked)
    assert isinstance(found, InferResponse), found
    return str(found.parameters["told"])
