"""Shapes that clients see, and shapes that the model sees."""

import pytest

from gateway.batches.shapes import Reshape, Reshapes, agree, as_model_sees
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import Datatype, Tensor

FP32 = DataType.TYPE_FP32


def config(
    dims: tuple[int, ...], shape: tuple[int, ...], *, max_batch_size: int = 8
) -> ModelConfig:
    """Input X and output Y with that reshape, input P and output Q with none."""
    reshape = TensorReshape(shape=shape)
    return ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        input=(
            ModelInput(name="X", data_type=FP32, dims=dims, reshape=reshape),
            ModelInput(name="P", data_type=FP32, dims=dims),
        ),
        output=(
            ModelOutput(name="Y", data_type=FP32, dims=dims, reshape=reshape),
            ModelOutput(name="Q", data_type=FP32, dims=dims),
        ),
    )


def floats(name: str, *shape: int) -> Tensor:
    found = Tensor(name, Datatype.FP32, shape, b"")
    return Tensor(name, Datatype.FP32, shape, bytes(4 * found.count))


@pytest.mark.parametrize(
    ("dims", "shape", "sent", "seen"),
    [
        ((4,), (2, 2), (3, 4), (3, 2, 2)),
        ((4,), (2, 2), (0, 4), (0, 2, 2)),
        ((1,), (), (3, 1), (3,)),
        ((-1, 4), (-1, 2, 2), (2, 5, 4), (2, 5, 2, 2)),
        ((-1, 4), (-1, 2, 2), (2, 0, 4), (2, 0, 2, 2)),
        ((2, -1, 3, -1), (1, 2, -1, 3, -1, 1), (1, 2, 7, 3, 5), (1, 1, 2, 7, 3, 5, 1)),
    ],
)
def test_the_model_sees_its_own_shape_and_the_client_that_of_the_config(
    dims: tuple[int, ...], shape: tuple[int, ...], sent: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    reshapes = Reshapes(config(dims, shape))
    request = InferRequest(model="m", id="7", inputs=(floats("X", *sent), floats("P", *sent)))
    inside = reshapes.towards_model(request)
    assert [each.shape for each in inside.inputs] == [seen, sent]
    assert inside.inputs[0].data is request.inputs[0].data
    assert inside.id == "7"
    made = InferResponse(outputs=(floats("Y", *seen), floats("Q", *sent)), final=True)
    outside = reshapes.towards_client(made)
    assert [each.shape for each in outside.outputs] == [sent, sent]
    assert outside.outputs[0].data is made.outputs[0].data
    assert outside.final
    assert [each.shape for each in reshapes.as_made(outside)] == [seen, sent]


def test_a_model_that_does_not_batch_reshapes_the_whole_shape() -> None:
    reshapes = Reshapes(config((4,), (2, 2), max_batch_size=0))
    request = InferRequest(model="m", inputs=(floats("X", 4),))
    assert reshapes.towards_model(request).inputs[0].shape == (2, 2)


def test_an_output_in_another_shape_of_as_many_elements_has_that_of_the_config() -> None:
    """As on Triton: a model that answers in the client's shape works."""
    made = InferResponse(outputs=(floats("Y", 3, 4),))
    assert Reshapes(config((4,), (2, 2))).towards_client(made).outputs[0].shape == (3, 4)


@pytest.mark.parametrize("shape", [(1, 5), (1, 2, 3), (2,), ()])
def test_an_output_of_another_size_is_an_error_that_names_it(shape: tuple[int, ...]) -> None:
    with pytest.raises(InferenceError, match="tensor 'Y' of model 'm' cannot be") as caught:
        Reshapes(config((4,), (2, 2))).towards_client(InferResponse(outputs=(floats("Y", *shape),)))
    assert caught.value.code is Code.INTERNAL
    assert "expected [-1,2,2]" in caught.value.message


def test_a_shape_that_lacks_a_variable_dimension_does_not_fit() -> None:
    assert Reshape((-1,), (-1,), batching=True).shape((0,)) is None


def test_tensors_without_a_reshape_are_unchanged() -> None:
    plain = ModelConfig(name="m", input=(ModelInput(name="X", data_type=FP32, dims=(4,)),))
    assert not Reshapes(plain)
    flag = InferResponse(final=True)
    assert Reshapes(config((4,), (2, 2))).towards_client(flag) is flag


def test_the_config_of_the_model_has_its_dims_and_no_reshape() -> None:
    inside = as_model_sees(config((4,), (2, 2)))
    assert [(each.dims, each.reshape) for each in inside.input] == [((2, 2), None), ((4,), None)]
    assert [(each.dims, each.reshape) for each in inside.output] == [((2, 2), None), ((4,), None)]


def test_any_size_agrees_with_every_size_on_either_side() -> None:
    assert agree((-1, 2), (3, 2))
    assert agree((3, 2), (-1, 2))
    assert not agree((3, 2), (4, 2))
    assert not agree((3,), (3, 1))
