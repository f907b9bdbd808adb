"""Batches out of requests, and answers out of batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.batches.shapes import as_model_sees
from gateway.batches.stacking import Stacking
from gateway.config import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ModelInput,
    ModelOutput,
    TensorReshape,
)
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.tensor import NUMPY_TYPES, SIZES, Datatype, Tensor, array_tensor
from tests.gateway.batches.batch_parts import NUMERIC, echo, floats, one_to_one, only, request

# Batches.


def test_the_inputs_of_a_single_request_are_not_copied() -> None:
    sent = floats([[1, 2]])
    stacking = Stacking(one_to_one())
    gathered = stacking.gather([request(sent)])
    assert gathered["X"] is sent
    output = replace(sent, name="Y")
    assert list(stacking.scatter({"Y": output}, [request(sent)])) == [(output,)]
    assert next(iter(stacking.scatter({"Y": output}, [request(sent)])))[0].data is output.data


def test_requests_are_stacked_in_order_and_split_again() -> None:
    stacking = Stacking(one_to_one())
    requests = [request(floats([[1, 2]])), request(floats([[3, 4], [5, 6]]))]
    gathered = stacking.gather(requests)["X"]
    assert gathered.shape == (3, 2)
    assert gathered.array().tolist() == [[1, 2], [3, 4], [5, 6]]
    first, second = only(echo(stacking, requests))
    assert (first.name, first.shape, first.array().tolist()) == ("Y", (1, 2), [[1, 2]])
    assert (second.shape, second.array().tolist()) == ((2, 2), [[3, 4], [5, 6]])


@pytest.mark.parametrize("datatype", NUMERIC)
@pytest.mark.parametrize("size", [1, 40_000])
def test_every_datatype_survives_a_batch_of_few_and_of_many_bytes(
    datatype: Datatype, size: int
) -> None:
    wires = [bytes([n % 2]) * size * SIZES[datatype] for n in range(3)]
    requests = [request(Tensor("X", datatype, (1, size), wire)) for wire in wires]
    stacking = Stacking(one_to_one(datatype))
    assert stacking.gather(requests)["X"].datatype is datatype
    assert [bytes(each.raw()) for each in only(echo(stacking, requests))] == wires


def test_outputs_are_views_of_the_batchs_buffer() -> None:
    stacking = Stacking(one_to_one())
    requests = [request(floats([[n]])) for n in range(3)]
    batch = np.zeros((3, 1), dtype=np.float32)
    found = only(list(stacking.scatter({"Y": floats(batch, "Y")}, requests)))
    batch[:, 0] = [7, 8, 9]
    assert [each.array().item() for each in found] == [7, 8, 9]


def test_bytes_are_stacked_in_either_form() -> None:
    wire = b"\x01\x00\x00\x00a\x00\x00\x00\x00"
    requests = [
        request(Tensor("X", Datatype.BYTES, (1, 2), wire)),
        request(Tensor("X", Datatype.BYTES, (2, 2), (b"b", b"c", b"d", b"e"))),
    ]
    stacking = Stacking(one_to_one(Datatype.BYTES))
    gathered = stacking.gather(requests)["X"]
    assert gathered.elements() == (b"a", b"", b"b", b"c", b"d", b"e")
    assert [each.elements() for each in only(echo(stacking, requests))] == [
        (b"a", b""),
        (b"b", b"c", b"d", b"e"),
    ]
    on_the_wire = [requests[0], requests[0]]
    assert stacking.gather(on_the_wire)["X"].elements() == (b"a", b"", b"a", b"")


def test_tensors_without_elements_are_stacked_too() -> None:
    stacking = Stacking(one_to_one())
    requests = [request(floats(np.zeros((rows, 0)))) for rows in (1, 2)]
    assert stacking.gather(requests)["X"].shape == (3, 0)
    assert [each.shape for each in only(echo(stacking, requests))] == [(1, 0), (2, 0)]
    nobody = [request(floats(np.zeros((0, 3)))), request(floats(np.ones((1, 3))))]
    assert [each.array().tolist() for each in only(echo(stacking, nobody))] == [[], [[1, 1, 1]]]


def test_inputs_that_all_requests_omit_are_not_stacked() -> None:
    optional = ModelInput(name="O", data_type=DataType.TYPE_FP32, dims=(1,), optional=True)
    config = one_to_one()
    stacking = Stacking(replace(config, input=(*config.input, optional)))
    requests = [request(floats([[1]])), request(floats([[2]]))]
    assert list(stacking.gather(requests)) == ["X"]
    both = [request(floats([[n]]), floats([[-n]], "O")) for n in (1, 2)]
    assert stacking.gather(both)["O"].array().tolist() == [[-1], [-2]]


# Outputs that are asked for.


TWO = replace(
    one_to_one(),
    output=tuple(
        ModelOutput(name=name, data_type=DataType.TYPE_FP32, dims=(-1,)) for name in ("Y", "Z")
    ),
)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([()], ("Y", "Z")),
        ([("Z",)], ("Z",)),
        ([("Z", "Y")], ("Y", "Z")),
        ([("Z",), ("Y",)], ("Y", "Z")),
        ([("Z",), ("Z",)], ("Z",)),
        ([("Z",), ()], ("Y", "Z")),
    ],
)
def test_requested_outputs_are_computed_in_the_order_of_the_config(
    asked: list[tuple[str, ...]], wanted: tuple[str, ...]
) -> None:
    requests = [request(floats([[1]]), outputs=names) for names in asked]
    assert Stacking(TWO).wanted(requests) == wanted


def test_each_request_gets_its_requested_outputs() -> None:
    requests = [
        request(floats([[1]]), outputs=("Z",)),
        request(floats([[2]])),
        request(floats([[3]]), outputs=("Z", "Y")),
    ]
    outputs = {name: floats([[1], [2], [3]], name) for name in ("Y", "Z")}
    found = list(Stacking(TWO).scatter(outputs, requests))
    assert [[tensor.name for tensor in each] for each in found] == [["Z"], ["Y", "Z"], ["Y", "Z"]]


# Outputs that contradict the config.


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((3, 4), "shape [3,4], expected shape [2,4]"),
        ((1, 4), "shape [1,4], expected shape [2,4]"),
        ((2, 5), "shape [2,5], expected shape [2,4]"),
        ((2,), "shape [2], expected shape [2,4]"),
        ((2, 4, 1), "shape [2,4,1], expected shape [2,4]"),
        ((), "shape [], expected shape [2,4]"),
    ],
)
def test_an_output_of_another_shape_than_the_configs_is_refused(
    shape: tuple[int, ...], text: str
) -> None:
    requests = [request(floats(np.zeros((1, 4))))] * 2
    output = floats(np.zeros(shape), "Y")
    with pytest.raises(InferenceError) as caught:
        list(Stacking(one_to_one(dims=(4,))).scatter({"Y": output}, requests))
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == f"model 'm' gave output 'Y' with datatype FP32 and {text}"


def test_an_output_of_another_datatype_than_the_configs_is_refused() -> None:
    output = array_tensor("Y", Datatype.INT32, np.zeros((1, 4), dtype=np.int32))
    with pytest.raises(InferenceError, match=r"datatype INT32 .* expected datatype FP32"):
        list(Stacking(one_to_one()).scatter({"Y": output}, [request(floats(np.zeros((1, 4))))]))


def test_a_model_that_does_not_batch_answers_in_its_own_shape() -> None:
    stacking = Stacking(replace(one_to_one(dims=(2, -1)), max_batch_size=0))
    (answer,) = only(echo(stacking, [request(floats(np.ones((2, 3))))]))
    assert answer.shape == (2, 3)
    with pytest.raises(InferenceError, match=r"shape \[3,3\], expected shape \[2,-1\]"):
        echo(stacking, [request(floats(np.ones((3, 3))))])


# Reshape.


def test_a_model_with_a_reshape_is_stacked_in_the_shapes_that_it_sees() -> None:
    reshape = TensorReshape(shape=(2, 2))
    config = one_to_one(dims=(4,))
    stacking = Stacking(
        as_model_sees(
            replace(
                config,
                input=(replace(config.input[0], reshape=reshape),),
                output=(replace(config.output[0], reshape=reshape),),
            )
        )
    )
    one = request(floats(np.arange(12).reshape(3, 2, 2)))
    assert stacking.gather([one])["X"].data is one.inputs[0].data
    assert [each.shape for each in only(echo(stacking, [one, one]))] == [(3, 2, 2)] * 2


# Ragged batches and what is derived from a batch.


def ragged(*batch_input: BatchInput, **fields: Any) -> Stacking:
    config = one_to_one(batch_input=batch_input, **fields)
    return Stacking(replace(config, input=(replace(config.input[0], allow_ragged_batch=True),)))


def shaped(*shapes: tuple[int, ...]) -> list[InferRequest]:
    """Requests whose elements count on from one to the next."""
    begin = 0
    requests = []
    for shape in shapes:
        end = begin + int(np.prod(shape))
        requests.append(request(floats(np.arange(begin, end).reshape(shape))))
        begin = end
    return requests


@pytest.mark.parametrize("shapes", [[(1, 3)], [(1, 3), (2, 2), (1, 1)]])
def test_ragged_inputs_are_laid_flat_one_behind_the_other(shapes: list[tuple[int, ...]]) -> None:
    gathered = ragged().gather(shaped(*shapes))["X"]
    assert gathered.array().tolist() == list(range(sum(int(np.prod(each)) for each in shapes)))


@pytest.mark.parametrize("data_type", [DataType.TYPE_INT32, DataType.TYPE_FP32])
@pytest.mark.parametrize(
    ("kind", "shapes", "values"),
    [
        (BatchInputKind.BATCH_ELEMENT_COUNT, [(1, 3), (2, 2), (1, 5)], [3, 4, 5]),
        (BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT, [(1, 3), (2, 2), (1, 5)], [3, 7, 12]),
        (
            BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO,
            [(1, 3), (2, 2), (1, 5)],
            [0, 3, 7, 12],
        ),
        (BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, [(1, 3), (2, 2)], [0, 0, 0, 0]),
        (BatchInputKind.BATCH_ITEM_SHAPE, [(2, 3, 1), (1, 2, 2)], [[3, 1], [3, 1], [2, 2]]),
        (BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN, [(2, 3, 1), (1, 2, 2)], [3, 1, 3, 1, 2, 2]),
        (BatchInputKind.BATCH_ELEMENT_COUNT, [(2, 0)], [0]),
        (BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, [(1, 0)], []),
    ],
)
def test_a_model_gets_its_batch_inputs(
    kind: BatchInputKind, shapes: list[tuple[int, ...]], values: list[Any], data_type: DataType
) -> None:
    told = BatchInput(kind=kind, target_name=("A", "B"), data_type=data_type, source_input=("X",))
    gathered = ragged(told).gather(shaped(*shapes))
    for name in ("A", "B"):
        assert gathered[name].datatype is data_type.datatype
        assert gathered[name].array().dtype == NUMPY_TYPES[data_type.datatype]
        assert gathered[name].array().tolist() == values


def test_a_flat_output_is_cut_up_by_the_shapes_of_an_input() -> None:
    scatter = BatchOutput(target_name=("Y",), source_input=("X",))
    stacking = ragged(batch_output=(scatter,))
    requests = shaped((1, 3), (2, 2))
    first, second = only(echo(stacking, requests))
    assert (first.shape, first.array().tolist()) == ((1, 3), [[0, 1, 2]])
    assert (second.shape, second.array().tolist()) == ((2, 2), [[3, 4], [5, 6]])
    assert only(echo(stacking, requests[:1]))[0].shape == (1, 3)


def test_a_flat_output_that_is_too_long_for_its_inputs_is_refused() -> None:
    scatter = BatchOutput(target_name=("Y",), source_input=("X",))
    with pytest.raises(InferenceError, match="expected 7 elements, as 'X' has"):
        list(
            ragged(batch_output=(scatter,)).scatter(
                {"Y": floats(np.zeros(8), "Y")}, shaped((1, 3), (2, 2))
            )
        )


def test_a_batch_input_needs_its_source() -> None:
    told = BatchInput(target_name=("A",), data_type=DataType.TYPE_INT32, source_input=("X",))
    with pytest.raises(InferenceError) as caught:
        ragged(told).gather([request()])
    assert caught.value.code is Code.INVALID_ARG
    assert "input 'X' of model 'm' is missing" in caught.value.message
