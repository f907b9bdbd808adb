"""An instance behind a reshape differs only in shapes."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.backend import Answer, ForwardingInstance, Instance, Note
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.models.reshaped_instance import with_reshapes
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor
from tests.builders import soon

FP32 = DataType.TYPE_FP32
SQUARE = TensorReshape(shape=(2, 2))
FLAT = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(ModelInput(name="X", data_type=FP32, dims=(4,)),),
    output=(ModelOutput(name="X", data_type=FP32, dims=(4,)),),
)
RESHAPED = replace(
    FLAT,
    input=(replace(FLAT.input[0], reshape=SQUARE),),
    output=(replace(FLAT.output[0], reshape=SQUARE),),
)
FAILED = InferenceError(Code.INTERNAL, "no")


class Echo(Instance):
    """Answers its inputs, then the given answers; records its calls."""

    concurrency = None
    adapters = ("a",)
    max_model_len = 7

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.seen: list[InferRequest] = []
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.open = 0
        self.closed = False

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        self.open += 1
        self.seen += requests
        try:
            for index, request in enumerate(requests):
                yield index, InferResponse(outputs=request.inputs)
            for answer in self.answers:
                yield answer
        finally:
            self.open -= 1

    async def check_ready(self) -> None:
        raise FAILED

    @property
    def waits_for(self) -> Iterable[str]:
        return ["other"]

    @property
    def metrics(self) -> Iterable[Metric]:
        return [GaugeMetricFamily("x", "of the runtime")]

    async def close(self) -> None:
        self.closed = True


def asked(rows: int) -> InferRequest:
    return InferRequest(
        model="m", inputs=(Tensor("X", Datatype.FP32, (rows, 4), bytes(16 * rows)),)
    )


async def test_without_a_reshape_there_is_nothing_between() -> None:
    echo = Echo()
    assert with_reshapes(echo, FLAT) is echo


async def test_requests_and_responses_are_reshaped() -> None:
    echo = Echo((1, Note.FREED), (0, FAILED))
    instance = with_reshapes(echo, RESHAPED)
    answers = [each async for each in instance.execute([asked(1), asked(3)])]
    assert [each.inputs[0].shape for each in echo.seen] == [(1, 2, 2), (3, 2, 2)]
    first, second, note, error = answers
    assert isinstance(first[1], InferResponse)
    assert isinstance(second[1], InferResponse)
    assert first[1].outputs[0].shape == (1, 4)
    assert second[1].outputs[0].shape == (3, 4)
    assert (note, error) == ((1, Note.FREED), (0, FAILED))


async def test_an_output_that_does_not_fit_fails_its_request_alone() -> None:
    wrong = Tensor("X", Datatype.FP32, (1, 5), bytes(20))
    echo = Echo((0, InferResponse(outputs=(wrong,))), (1, InferResponse(final=True)))
    answers = [each async for each in with_reshapes(echo, RESHAPED).execute([asked(1), asked(1)])]
    index, error = answers[2]
    assert (index, answers[3]) == (0, (1, InferResponse(final=True)))
    assert isinstance(error, InferenceError)
    assert error.code is Code.INTERNAL


async def test_closing_the_answers_closes_those_of_the_instance() -> None:
    echo = Echo()
    async with aclosing(with_reshapes(echo, RESHAPED).execute([asked(1)])) as answers:
        await soon(anext(answers))
        assert echo.open == 1
    assert echo.open == 0


async def test_a_reshaped_request_has_the_cancellation_of_its_original() -> None:
    echo, stream = Echo(), ResponseStream()
    request = replace(asked(1), cancellation=stream)
    async with aclosing(with_reshapes(echo, RESHAPED).execute([request])) as answers:
        await soon(anext(answers))
    assert echo.seen[0].cancellation is stream


async def test_everything_else_is_the_instances_own() -> None:
    echo = Echo()
    instance = with_reshapes(echo, RESHAPED)
    public = {name for name in vars(Instance) if not name.startswith("_")}
    own = vars(type(instance)).keys() | vars(ForwardingInstance).keys()
    assert public - {"singles"} <= own | vars(instance).keys()
    assert instance.singles is None, "their requests would not be reshaped"
    assert (instance.concurrency, instance.adapters, instance.max_model_len) == (None, ("a",), 7)
    assert instance.death is echo.death
    assert instance.number == echo.number
    assert [each.name for each in instance.metrics] == ["x"]
    assert instance.waits_for == ["other"]
    with pytest.raises(InferenceError, match="no"):
        await instance.check_ready()
    await instance.close()
    assert echo.closed
