"""Which requests may share a batch."""

from collections.abc import Sequence

from gateway.batches.padding import Padding
from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.messages import InferRequest
from gateway.schedulers.queue import Compatibility
from gateway.tensor import Datatype, Tensor


def model_input(name: str, *dims: int, **fields: bool) -> ModelInput:
    return ModelInput(name=name, data_type=DataType.TYPE_INT8, dims=dims, **fields)  # type: ignore[arg-type]


def compatibility(*inputs: ModelInput, padded: Sequence[str] = ()) -> Compatibility:
    return Compatibility(
        ModelConfig(max_batch_size=8, input=inputs), Padding(dict.fromkeys(padded, 0.0))
    )


def request(data: bytes = b"", **shapes: tuple[int, ...]) -> InferRequest:
    inputs = tuple(Tensor(name, Datatype.INT8, shape, data) for name, shape in shapes.items())
    return InferRequest(model="m", inputs=inputs)


def test_fixed_shapes_always_fit_together_whatever_their_batch() -> None:
    found = compatibility(model_input("a", 4), model_input("b", 2, 2))
    assert found.uniform
    first, second = request(a=(1, 4), b=(1, 2, 2)), request(a=(3, 4), b=(3, 2, 2))
    assert found.key(first) == found.key(second)


def test_variable_inputs_need_items_of_one_shape() -> None:
    found = compatibility(model_input("a", -1, 2), model_input("b", 4))
    assert not found.uniform
    assert found.key(request(a=(1, 3, 2), b=(1, 4))) == found.key(request(a=(2, 3, 2), b=(2, 4)))
    assert found.key(request(a=(1, 3, 2), b=(1, 4))) != found.key(request(a=(1, 5, 2), b=(1, 4)))


def test_the_order_of_the_inputs_does_not_matter() -> None:
    found = compatibility(model_input("a", -1), model_input("b", -1))
    assert found.key(request(a=(1, 3), b=(1, 4))) == found.key(request(b=(1, 4), a=(1, 3)))
    assert found.key(request(a=(1, 3), b=(1, 4))) != found.key(request(a=(1, 4), b=(1, 3)))


def test_ragged_inputs_are_not_compared() -> None:
    found = compatibility(model_input("a", -1, allow_ragged_batch=True))
    assert found.key(request(a=(1, 3))) == found.key(request(a=(1, 9)))


def test_padded_inputs_may_differ_in_length_and_in_nothing_else() -> None:
    found = compatibility(model_input("a", -1, -1), padded=["a"])
    assert found.key(request(a=(1, 3, 2))) == found.key(request(a=(1, 9, 2)))
    assert found.key(request(a=(1, 3, 2))) != found.key(request(a=(1, 3, 4)))
    assert compatibility(model_input("a", -1, 4), padded=["a"]).uniform


def test_optional_inputs_must_be_the_same_ones() -> None:
    found = compatibility(model_input("a", 1), model_input("b", 1, optional=True))
    assert found.key(request(a=(1, 1))) == found.key(request(a=(2, 1)))
    assert found.key(request(a=(1, 1))) != found.key(request(a=(1, 1), b=(1, 1)))


def test_shape_tensors_must_be_equal() -> None:
    found = compatibility(model_input("a", 2, is_shape_tensor=True))
    assert found.key(request(b"\1\2", a=(1, 2))) == found.key(request(b"\1\2", a=(1, 2)))
    assert found.key(request(b"\1\2", a=(1, 2))) != found.key(request(b"\1\3", a=(1, 2)))
