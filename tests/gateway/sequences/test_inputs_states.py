from dataclasses import replace

import numpy as np
import pytest

from gateway.config import ModelConfig, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import SequenceBatching, State
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.sequences.inputs import States, zeros
from gateway.tensor import Datatype, Tensor, array_tensor

SUM = State(input_name="in", output_name="out", data_type=DataType.TYPE_INT32, dims=(2,))
TEXT = State(input_name="was", output_name="is", data_type=DataType.TYPE_STRING, dims=(2, -1))


def states(*given: State, batched: bool = True, outputs: tuple[str, ...] = ("y",)) -> States:
    return States(
        ModelConfig(
            max_batch_size=4 if batched else 0,
            output=tuple(ModelOutput(name=name) for name in outputs),
            sequence_batching=SequenceBatching(state=given),
        ),
        {},
    )


def number(name: str, *values: int) -> Tensor:
    return array_tensor(name, Datatype.INT32, np.array([values], "<i4"))


def asking(*names: str) -> InferRequest:
    return InferRequest(model="m", outputs=tuple(RequestedOutput(name) for name in names))


def names(response: InferResponse) -> list[str]:
    return [each.name for each in response.outputs]


def test_without_a_value_a_state_begins_with_zeros() -> None:
    found = states(SUM, TEXT).initial
    assert found["in"].array().tolist() == [[0, 0]]
    assert (found["was"].shape, found["was"].elements()) == ((1, 2, 1), (b"", b""))
    assert states(SUM, batched=False).initial["in"].shape == (2,)


@pytest.mark.parametrize(
    ("datatype", "size"), [(Datatype.BOOL, 6), (Datatype.FP64, 48), (Datatype.BF16, 12)]
)
def test_zeros_have_the_size_of_their_shape(datatype: Datatype, size: int) -> None:
    assert zeros("x", datatype, (2, 3)).raw() == bytes(size)


def test_given_values_come_first() -> None:
    config = ModelConfig(sequence_batching=SequenceBatching(state=(SUM,)))
    given = number("in", 5, 6)
    assert States(config, {"in": given}).initial == {"in": given}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((), ["y", "z", "out", "is"]),
        (("y",), ["y", "out", "is"]),
        (("y", "is"), ["y", "is", "out"]),
    ],
)
def test_the_model_is_asked_for_its_states_by_name(
    asked: tuple[str, ...], found: list[str]
) -> None:
    every = states(SUM, TEXT, outputs=("y", "z")).asked(asking(*asked))
    assert [each.name for each in every] == found


def test_without_states_the_model_is_asked_for_what_the_client_asks_for() -> None:
    assert [states().asked(asking(*names)) for names in ((), ("y",))] == [
        (),
        (RequestedOutput("y"),),
    ]


@pytest.mark.parametrize(
    ("outputs", "asked", "seen"),
    [
        (("y",), (), ["y"]),
        (("y",), ("y",), ["y"]),
        (("y", "out"), (), ["y", "out"]),
        (("y", "out"), ("y",), ["y"]),
        (("y", "out"), ("out", "y"), ["y", "out"]),
    ],
)
def test_clients_see_the_states_that_are_outputs_if_they_ask(
    outputs: tuple[str, ...], asked: tuple[str, ...], seen: list[str]
) -> None:
    response = InferResponse(outputs=(number("y", 1, 2), number("out", 3, 4)), final=True)
    shown, found = states(SUM, outputs=outputs).take(response, asking(*asked), shared=False)
    assert names(shown) == seen
    assert shown.final
    assert found["in"].array().tolist() == [[3, 4]]


def test_a_response_without_states_is_left_alone() -> None:
    response = InferResponse(outputs=(number("y", 1),))
    assert states(SUM).take(response, asking(), shared=True) == (response, {})


def test_the_state_of_a_shared_execution_does_not_keep_the_others() -> None:
    batch = bytearray(np.arange(8, dtype="<i4").tobytes())
    view = Tensor("out", Datatype.INT32, (1, 2), memoryview(batch)[8:16])
    response = InferResponse(outputs=(view,))
    _, alone = states(SUM).take(response, asking(), shared=False)
    _, shared = states(SUM).take(response, asking(), shared=True)
    batch[8:16] = bytes(8)
    assert alone["in"].array().tolist() == [[0, 0]]
    assert shared["in"].array().tolist() == [[2, 3]]


def test_only_shapes_that_may_differ_matter() -> None:
    found = states(SUM, TEXT)
    kept = {"in": number("in", 1, 2), "was": zeros("was", Datatype.BYTES, (1, 2, 3))}
    assert found.shapes(kept) == ((1, 2, 3),)
    assert states(SUM).shapes(kept) == ()


def test_a_state_that_clients_see_reshaped_keeps_the_shape_of_its_model() -> None:
    shown = ModelOutput(name="out", dims=(2,), reshape=TensorReshape(shape=(2, 1)))
    state = replace(SUM, dims=(2, 1))
    config = ModelConfig(
        max_batch_size=4, output=(shown,), sequence_batching=SequenceBatching(state=(state,))
    )
    given = InferResponse(outputs=(number("out", 3, 4),))
    response, found = States(config, {}).take(given, asking(), shared=False)
    assert response.outputs[0].shape == (1, 2)
    assert found["in"].shape == (1, 2, 1)
