"""Models that embed texts, by their tensors."""

from dataclasses import replace

import numpy as np
import pytest

from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.tensor import Datatype, array_tensor
from gateway.text_encoder import TextEncoder, encoder_of
from tests.gateway.frontends.http.openai.conftest import ENCODER, tensor_in, tensor_out

FP32, INT64 = DataType.TYPE_FP32, DataType.TYPE_INT64
TOKENS = tensor_out("num_input_tokens", DataType.TYPE_UINT32)


def encoder(config: ModelConfig = ENCODER) -> TextEncoder:
    found = encoder_of(config)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "shape", "size"),
    [
        (ENCODER, (1,), 4),
        (replace(ENCODER, max_batch_size=8), (1, 1), 4),
        (replace(ENCODER, input=(tensor_in("text", DataType.TYPE_STRING, -1),)), (1,), 4),
        (replace(ENCODER, output=(tensor_out("e", FP32, 1, 7),)), (1,), 7),
    ],
)
def test_a_text_in_and_a_vector_out_is_an_encoder(
    config: ModelConfig, shape: tuple[int, ...], size: int
) -> None:
    found = encoder(config)
    assert (found.shape, found.size) == (shape, size)


def test_optional_inputs_and_other_outputs_do_not_matter() -> None:
    more_in = (*ENCODER.input, tensor_in("mode", optional=True))
    more_out = (*ENCODER.output, tensor_out("hidden", FP32, -1, 4), tensor_out("ids", INT64, 9))
    found = encoder(replace(ENCODER, input=more_in, output=more_out))
    assert (found.input, found.output) == ("text", "embedding")
    assert [each.name for each in found.request("x", "r", 0).outputs] == ["embedding"]


@pytest.mark.parametrize(
    "config",
    [
        replace(ENCODER, input=()),
        replace(ENCODER, input=(tensor_in("ids", INT64, -1),)),
        replace(ENCODER, input=(tensor_in("texts", DataType.TYPE_STRING, 2),)),
        replace(ENCODER, input=(*ENCODER.input, tensor_in("mode"))),
        replace(ENCODER, output=()),
        replace(ENCODER, output=(tensor_out("e", FP32, -1),)),
        replace(ENCODER, output=(tensor_out("e", FP32, 2, 4),)),
        replace(ENCODER, output=(tensor_out("e", DataType.TYPE_FP64, 4),)),
        replace(ENCODER, output=(tensor_out("a", FP32, 4), tensor_out("b", FP32, 4))),
    ],
    ids=["no input", "ids", "pairs", "more", "no output", "any size", "matrix", "FP64", "two"],
)
def test_tensors_with_another_reading_are_no_encoders(config: ModelConfig) -> None:
    assert encoder_of(config) is None


def test_a_text_becomes_one_element_of_the_input() -> None:
    request = encoder().request("Käse", "r1", 7)
    assert (request.model, request.id, request.received_ns) == ("encoder", "r1", 7)
    (tensor,) = request.inputs
    assert (tensor.shape, tensor.elements()) == ((1,), ("Käse".encode(),))


def response(values: list[float], name: str = "embedding") -> InferResponse:
    array = np.array([values], np.float32)
    return InferResponse(outputs=(array_tensor(name, Datatype.FP32, array),), final=True)


def test_the_vector_is_the_output_of_any_shape() -> None:
    assert encoder().vector(response([1, 2, 3, 4])).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "answer",
    [
        response([1, 2, 3]),
        response([1, 2, 3, float("nan")]),
        response([1, 2, 3, float("inf")]),
        response([1, 2, 3, 4], "other"),
        InferResponse(final=True),
    ],
    ids=["too short", "NaN", "infinite", "another output", "nothing"],
)
def test_anything_but_a_vector_of_numbers_is_the_models_mistake(answer: InferResponse) -> None:
    with pytest.raises(InferenceError, match="did not answer with 4 finite numbers") as caught:
        encoder().vector(answer)
    assert caught.value.code is Code.INTERNAL


def test_tokens_are_counted_if_the_model_has_that_output() -> None:
    telling = encoder(replace(ENCODER, output=(*ENCODER.output, TOKENS)))
    count = array_tensor(TOKENS.name, Datatype.UINT32, np.array([[5]], np.uint32))
    assert telling.tokens(InferResponse(outputs=(count,), final=True)) == 5
    assert [each.name for each in telling.request("x", "", 0).outputs] == ["embedding", TOKENS.name]
    assert telling.tokens(InferResponse(final=True)) == 0
    assert encoder().tokens(InferResponse(outputs=(count,), final=True)) == 0


def test_a_token_count_that_is_no_integer_is_not_asked_for() -> None:
    odd = replace(ENCODER, output=(*ENCODER.output, tensor_out("num_input_tokens")))
    assert not encoder(odd).counts_tokens
