"""The backend `square`: IN responses to a request, as Triton's square backend for tests."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Tensor
from gateway.tensor_runtime.parameters import count

INPUT = ModelInput(name="IN", data_type=DataType.TYPE_INT32, dims=(1,))
OUTPUT = ModelOutput(name="OUT", data_type=DataType.TYPE_INT32, dims=(1,))

FAILURE = InferenceError(Code.UNKNOWN, "simulated failure")


@dataclass(frozen=True, slots=True)
class SquareSettings:
    """The `parameters` of a config that the backend reads.

    Of n responses the last `empty` are not sent, and the `fail` before them are errors. The delays
    are in seconds: `infer` comes before each response, `output` before each that is sent.
    """

    infer: float
    output: float
    fail: int
    empty: int

    @classmethod
    def read(cls, config: ModelConfig) -> "SquareSettings":
        """The settings of a config; InferenceError INVALID_ARG for a value that is no number."""
        return cls(
            infer=count(config.parameters, "CUSTOM_INFER_DELAY_NS") / 1e9,
            output=count(config.parameters, "CUSTOM_OUTPUT_DELAY_NS") / 1e9,
            fail=count(config.parameters, "CUSTOM_FAIL_COUNT"),
            empty=count(config.parameters, "CUSTOM_EMPTY_COUNT"),
        )


class SquareInstance(Instance):
    """n responses with n as OUT for a request with n as IN; the final flag is sent alone."""

    concurrency = None

    def __init__(self, settings: SquareSettings) -> None:
        self._settings = settings

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            tensor = request.input("IN")
            if error := _mistake(tensor):
                yield index, error
            elif tensor is not None:
                async for response in self._responses(tensor):
                    yield index, response

    async def _responses(self, tensor: Tensor) -> AsyncGenerator[InferResponse, None]:
        number = int(tensor.array().item())
        right = InferResponse(outputs=(replace(tensor, name="OUT"),))
        first_empty = max(0, number - self._settings.empty)
        for place in range(number):
            await asyncio.sleep(self._settings.infer)
            if place < first_empty:
                await asyncio.sleep(self._settings.output)
                fails = place >= first_empty - self._settings.fail
                yield InferResponse(error=FAILURE) if fails else right
        yield InferResponse(final=True)

    async def close(self) -> None:
        """Nothing to release."""


def _mistake(tensor: Tensor | None) -> InferenceError | None:
    if tensor is None:
        return InferenceError(Code.INVALID_ARG, "input 'IN' is missing")
    if tensor.count != 1:
        return InferenceError(
            Code.INVALID_ARG,
            f"unexpected shape for IN input: {list(tensor.shape)}, expected one element",
        )
    if (number := int(tensor.array().item())) < 0:
        return InferenceError(Code.INVALID_ARG, f"'IN' is {number}, expected >= 0")
    return None


class SquareBackend(Backend):
    """The backend `square`."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return replace(
            config,
            input=config.input or (INPUT,),
            output=config.output or (OUTPUT,),
            model_transaction_policy=TransactionPolicy(decoupled=True),
        )

    async def load(self, context: ModelContext) -> Instance:
        for given, expected in ((context.config.input, INPUT), (context.config.output, OUTPUT)):
            _check(given, expected)
        return SquareInstance(SquareSettings.read(context.config))


def _check(given: Sequence[ModelInput | ModelOutput], expected: ModelInput | ModelOutput) -> None:
    """Raise INVALID_ARG with Triton's text unless there is exactly the expected tensor."""
    kind = "input" if isinstance(expected, ModelInput) else "output"
    if len(given) != 1:
        raise InferenceError(Code.INVALID_ARG, f"expected 1 {kind}, got {len(given)}")
    (found,) = given
    name = expected.name
    if found.name != name:
        problem = f"expected first {kind} tensor name to be {name}, got {found.name}"
    elif found.dims != expected.dims:
        problem = f"expected {name} shape to be [1], got {list(found.dims)}"
    elif found.data_type is not expected.data_type:
        problem = f"expected {name} datatype to be INT32, got {found.data_type.name}"
    else:
        return
    raise InferenceError(Code.INVALID_ARG, problem)
