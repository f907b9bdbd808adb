"""Answer a request n times: a decoupled model without an engine, for tests and load tests."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from gateway.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Tensor

INPUTS = (
    ModelInput(name="text_input", data_type=DataType.TYPE_STRING, dims=(1,)),
    ModelInput(name="n", data_type=DataType.TYPE_INT32, dims=(1,)),
    ModelInput(name="delay_us", data_type=DataType.TYPE_INT32, dims=(1,), optional=True),
)
OUTPUTS = (ModelOutput(name="text_output", data_type=DataType.TYPE_STRING, dims=(1,)),)


class RepeatInstance(Instance):
    """n responses with `text_input` as `text_output`, `delay_us` microseconds apart.

    The last response carries the final flag; for n = 0 the flag comes alone. A negative n fails.
    """

    concurrency = None

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            count, delay_us = _scalar(request, "n"), _scalar(request, "delay_us")
            given = {"n": count, "delay_us": delay_us}
            if wrong := [f"'{key}' is {value}" for key, value in given.items() if value < 0]:
                yield index, InferenceError(Code.INVALID_ARG, f"{wrong[0]}, expected >= 0")
                continue
            response = InferResponse(outputs=(_output(request),))
            for _ in range(count - 1):
                await _pause(delay_us)
                yield index, response
            await _pause(delay_us)
            yield index, replace(response if count else InferResponse(), final=True)

    async def close(self) -> None:
        """Nothing is held."""


async def _pause(delay_us: int) -> None:
    if delay_us:
        await asyncio.sleep(delay_us / 1e6)


def _scalar(request: InferRequest, name: str) -> int:
    tensor = request.input(name)
    return int(tensor.array().item()) if tensor is not None else 0


def _output(request: InferRequest) -> Tensor:
    tensor = request.input("text_input")
    if tensor is None:
        raise InferenceError(Code.INVALID_ARG, "input 'text_input' is missing")
    return replace(tensor, name="text_output")


class RepeatBackend(Backend):
    """Backend `repeat`."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return replace(
            config,
            input=config.input or INPUTS,
            output=config.output or OUTPUTS,
            model_transaction_policy=TransactionPolicy(decoupled=True),
        )

    async def load(self, context: ModelContext) -> Instance:
        return RepeatInstance()
