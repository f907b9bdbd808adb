"""The backend `repeat`: requests answered n times, a decoupled model for tests.

A config whose inputs are IN, DELAY and WAIT gets the model of Triton's own repeat backend.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gateway.backend import Answer, Backend, Instance, ModelContext, Note
from gateway.config import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, Tensor, array_tensor, format_shape

Side = ModelInput | ModelOutput

INPUTS = (
    ModelInput(name="text_input", data_type=DataType.TYPE_STRING, dims=(1,)),
    ModelInput(name="n", data_type=DataType.TYPE_INT32, dims=(1,)),
    ModelInput(name="delay_us", data_type=DataType.TYPE_INT32, dims=(1,), optional=True),
)
OUTPUTS = (ModelOutput(name="text_output", data_type=DataType.TYPE_STRING, dims=(1,)),)

TRITON_INPUTS = (
    ModelInput(name="IN", data_type=DataType.TYPE_INT32, dims=(-1,)),
    ModelInput(name="DELAY", data_type=DataType.TYPE_UINT32, dims=(-1,)),
    ModelInput(name="WAIT", data_type=DataType.TYPE_UINT32, dims=(1,)),
)
TRITON_OUTPUTS = (
    ModelOutput(name="OUT", data_type=DataType.TYPE_INT32, dims=(1,)),
    ModelOutput(name="IDX", data_type=DataType.TYPE_UINT32, dims=(1,)),
)
"""The tensors of Triton's repeat backend, as in its model repeat_int32."""
PLACES = ("first", "second", "third")


class RepeatInstance(Instance):
    """n responses with `text_input` as `text_output`, `delay_us` microseconds apart.

    The last response carries the final flag; for n = 0 the flag is sent alone. A negative n fails.
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
                if delay_us:
                    await asyncio.sleep(delay_us / 1e6)
                yield index, response
            if delay_us:
                await asyncio.sleep(delay_us / 1e6)
            yield index, replace(response if count else InferResponse(), final=True)

    async def close(self) -> None:
        """Nothing to release."""


class TritonRepeatInstance(Instance):
    """Each element of IN as OUT, with its place as IDX, after its DELAY in milliseconds.

    An execution takes WAIT milliseconds, as in Triton's backend; responses may be sent before and
    after its end. The final flag of a decoupled model is sent alone.
    """

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            values, delays_ms = _numbers(request, "IN"), _numbers(request, "DELAY")
            if len(values) == len(delays_ms):
                async for answer in self._answers(index, values, delays_ms, request):
                    yield answer
            else:
                yield (
                    index,
                    InferenceError(
                        Code.INVALID_ARG,
                        "expected IN and DELAY shape to match, got "
                        f"[{len(values)}] and [{len(delays_ms)}]",
                    ),
                )

    async def _answers(
        self, index: int, values: Sequence[int], delays_ms: Sequence[int], request: InferRequest
    ) -> AsyncGenerator[Answer, None]:
        due = asyncio.get_running_loop().time()
        free_at, is_free = due + sum(_numbers(request, "WAIT")) / 1e3, False
        for place, (value, delay_ms) in enumerate(zip(values, delays_ms, strict=True)):
            due += delay_ms / 1e3
            if not is_free and free_at < due:
                await _sleep_until(free_at)
                is_free = True
                yield index, Note.FREED
            await _sleep_until(due)
            is_last = place == len(values) - 1 and not self._decoupled
            yield index, replace(_triton_response(value, place), final=is_last)
        if self._decoupled or not values:
            yield index, InferResponse(final=True)
        if not is_free:
            await _sleep_until(free_at)

    async def close(self) -> None:
        """Nothing to release."""


def _numbers(request: InferRequest, name: str) -> list[int]:
    tensor = request.input(name)
    return [] if tensor is None else [int(each) for each in tensor.array().reshape(-1)]


def _triton_response(value: int, place: int) -> InferResponse:
    out = array_tensor("OUT", Datatype.INT32, np.array([value]))
    return InferResponse(outputs=(out, array_tensor("IDX", Datatype.UINT32, np.array([place]))))


async def _sleep_until(moment: float) -> None:
    left = moment - asyncio.get_running_loop().time()
    if left > 0:
        await asyncio.sleep(left)


def _scalar(request: InferRequest, name: str) -> int:
    tensor = request.input(name)
    return int(tensor.array().item()) if tensor is not None else 0


def _output(request: InferRequest) -> Tensor:
    tensor = request.input("text_input")
    if tensor is None:
        raise InferenceError(Code.INVALID_ARG, "input 'text_input' is missing")
    return replace(tensor, name="text_output")


class RepeatBackend(Backend):
    """The backend `repeat`."""

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        if _is_tritons(config):
            _check_tritons(config)
            return replace(
                config, input=config.input or TRITON_INPUTS, output=config.output or TRITON_OUTPUTS
            )
        _check_names(config, config.input, [each.name for each in INPUTS])
        _check_names(config, config.output, [each.name for each in OUTPUTS])
        return replace(
            config,
            input=config.input or INPUTS,
            output=config.output or OUTPUTS,
            model_transaction_policy=TransactionPolicy(decoupled=True),
        )

    async def load(self, context: ModelContext) -> Instance:
        if _is_tritons(context.config):
            _check_tritons(context.config)
            return TritonRepeatInstance(decoupled=context.config.decoupled)
        return RepeatInstance()


def _is_tritons(config: ModelConfig) -> bool:
    inputs = {each.name for each in config.input} & {each.name for each in TRITON_INPUTS}
    outputs = {each.name for each in config.output} & {each.name for each in TRITON_OUTPUTS}
    return bool(inputs or outputs)


def _check_tritons(config: ModelConfig) -> None:
    """Raise INVALID_ARG with the text of Triton's repeat backend for its first objection.

    The order of the tensors is free.
    """
    if problem := next(_problems(config), ""):
        raise InferenceError(Code.INVALID_ARG, problem)


def _problems(config: ModelConfig) -> Iterator[str]:
    if config.batching:
        yield "repeat backend only supports models with max_batch_size == 0"
    inputs: Sequence[Side] = config.input or TRITON_INPUTS
    outputs: Sequence[Side] = config.output or TRITON_OUTPUTS
    yield from _number_problems(inputs, TRITON_INPUTS, "input")
    yield from _number_problems(outputs, TRITON_OUTPUTS, "output")
    yield from _name_problems(inputs, TRITON_INPUTS, "input")
    yield from _name_problems(outputs, TRITON_OUTPUTS, "output")
    found = {each.name: each for each in (*inputs, *outputs)}
    yield from _shape_problems({name: each.dims for name, each in found.items()})
    known: Sequence[Side] = (*TRITON_INPUTS, *TRITON_OUTPUTS)
    for each in known:
        given = found[each.name].data_type
        if given is not each.data_type:
            expected = each.datatype.value
            yield f"expected {each.name} datatype to be {expected}, got {given.name}"


def _number_problems(given: Sequence[Side], expected: Sequence[Side], side: str) -> Iterator[str]:
    if len(given) != len(expected):
        yield f"expected {len(expected)} {side}s, got {len(given)}"


def _name_problems(given: Sequence[Side], expected: Sequence[Side], side: str) -> Iterator[str]:
    if {each.name for each in given} == {each.name for each in expected}:
        return
    for place, found, known in zip(PLACES, given, expected, strict=False):
        if found.name != known.name:
            yield f"expected {place} {side} tensor name to be {known.name}, got {found.name}"


def _shape_problems(dims: Mapping[str, Sequence[int]]) -> Iterator[str]:
    shown = {name: format_shape(each) for name, each in dims.items()}
    if len(dims["IN"]) != 1:
        yield f"expected IN shape to have one dimension, got {shown['IN']}"
    if shown["IN"] != shown["DELAY"]:
        yield f"expected IN and DELAY shape to match, got {shown['IN']} and {shown['DELAY']}"
    for name in ("WAIT", "OUT", "IDX"):
        if shown[name] != "[1]":
            yield f"expected {name} shape to be [1], got {shown[name]}"


def _check_names(config: ModelConfig, given: Iterable[Side], expected: Sequence[str]) -> None:
    if not {each.name for each in given} <= set(expected):
        raise _unlike(config, given, expected)


def _unlike(config: ModelConfig, given: Iterable[Side], expected: Sequence[str]) -> InferenceError:
    found = ", ".join(each.name for each in given)
    return _refusal(config, f"its config has the tensors {found}, expected {', '.join(expected)}")


def _refusal(config: ModelConfig, problem: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"backend 'repeat' cannot load model '{config.name}': {problem}"
    )
