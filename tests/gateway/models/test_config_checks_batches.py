"""The fields `batch_input` and `batch_output`."""

import pytest

from gateway.config import BatchInput, BatchOutput, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors


def config(
    batch_input: tuple[BatchInput, ...] = (), batch_output: tuple[BatchOutput, ...] = ()
) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=1,
        input=(ModelInput(name="X", data_type=DataType.TYPE_FP32, dims=(-1,)),),
        output=(ModelOutput(name="Y", data_type=DataType.TYPE_FP32, dims=(-1,)),),
        batch_input=batch_input,
        batch_output=batch_output,
    )


def told(*sources: str, data_type: DataType = DataType.TYPE_INT32) -> BatchInput:
    return BatchInput(target_name=("T",), data_type=data_type, source_input=sources)


def split(*targets: str, sources: tuple[str, ...] = ("X",)) -> BatchOutput:
    return BatchOutput(target_name=targets, source_input=sources)


@pytest.mark.parametrize("data_type", [DataType.TYPE_INT32, DataType.TYPE_FP32])
def test_what_fits_the_tensors_is_accepted(data_type: DataType) -> None:
    check_tensors(config((told("X", data_type=data_type),), (split("Y"),)))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (config((told(),)), "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0"),
        (
            config((told("X", "X"),)),
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2",
        ),
        (
            config((told("X", data_type=DataType.TYPE_INT64),)),
            "batch input data type must be TYPE_INT32 or TYPE_FP32",
        ),
        (config((told("Z"),)), "unknown source input name 'Z'"),
        (
            config((), (split("Y", sources=()),)),
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0",
        ),
        (config((), (split("Y", sources=("Z",)),)), "unknown source input name 'Z'"),
        (config((), (split("Z"),)), "unknown target output name 'Z'"),
        (config((), (split("Y", "Y"),)), "target output name 'Y' can only be specified once"),
        (config((), (split("Y"), split("Y"))), "target output name 'Y' can only be specified once"),
    ],
)
def test_what_contradicts_the_tensors_is_refused(wrong: ModelConfig, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        check_tensors(wrong)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == text
