"""Completion of configs from SavedModels, by Triton's rules, and drafts of configs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow.compat.v1 as tf

from gateway.backend_loader import BackendLoader
from gateway.config import (
    BatchInput,
    BatchInputKind,
    ModelConfig,
    ModelInput,
    ModelOutput,
    TensorReshape,
)
from gateway.config.data_type import DataType
from gateway.config.pbtxt import parse
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from gateway.models.normalisation import normalise
from gateway.tools.draft import draft, open_file
from tests.backends.tensorflow.models import (
    MadeModel,
    backend,
    save,
    save_graph_def,
    sums,
    unchanged,
)

FP32 = DataType.TYPE_FP32
EMPTY = ModelConfig(name="m", backend="tensorflow", platform="tensorflow_savedmodel")
GRAPH_DEF = replace(EMPTY, platform="tensorflow_graphdef")
UNKNOWN = None
"""The shape of a tensor of any rank."""


def complete(made: Any, folder: Path, config: ModelConfig = EMPTY, **settings: str) -> ModelConfig:
    whole = backend(**settings).complete(config, save(made, folder))
    check_tensors(whole)
    return whole


def refused_completion(made: Any, folder: Path, config: ModelConfig) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        complete(made, folder, config)
    return caught.value


def test_a_model_whose_first_dimensions_are_free_batches(folder: Path) -> None:
    found = complete(sums(), folder)
    assert found.max_batch_size == 4
    assert found.dynamic_batching == DynamicBatching(preferred_batch_size=(4,))
    assert found.input == tuple(ModelInput(name=n, data_type=FP32, dims=(16,)) for n in "AB")
    assert [each.name for each in found.output] == ["DIFFERENCE", "SUM"]


def test_the_batch_size_of_an_option_is_used(folder: Path) -> None:
    assert complete(sums(), folder, default_max_batch_size="9").max_batch_size == 9


def test_a_first_dimension_of_one_size_is_no_batch(folder: Path) -> None:
    found = complete(sums((3, 16)), folder)
    assert (found.max_batch_size, found.dynamic_batching) == (0, None)
    assert found.input[0].dims == (3, 16)


def test_a_batch_size_of_a_model_without_batches_is_refused(folder: Path) -> None:
    found = refused_completion(sums((3, 16)), folder, replace(EMPTY, max_batch_size=2))
    assert found.code is Code.INTERNAL
    assert found.message == (
        "unable to autofill for 'm', configuration specified max-batch 2 but model signature "
        "does not support batching"
    )


@pytest.mark.parametrize(("dims", "size"), [((16,), 4), ((-1, 16), 0)])
def test_listed_dims_decide_whether_a_model_batches(
    folder: Path, dims: tuple[int, ...], size: int
) -> None:
    listed = replace(EMPTY, input=(ModelInput(name="A", dims=dims),))
    found = complete(sums(), folder, listed)
    assert found.max_batch_size == size
    assert [each.dims for each in (*found.input, *found.output)] == [dims] * 4


def test_listed_dims_that_contradict_each_other_are_refused(folder: Path) -> None:
    listed = (ModelInput(name="A", dims=(16,)), ModelInput(name="B", dims=(-1, 16)))
    found = refused_completion(sums(), folder, replace(EMPTY, input=listed))
    assert found.code is Code.INTERNAL
    assert found.message == (
        "unable to autofill for 'm', model tensor configurations are contradicting each other in "
        "terms of whether batching is supported"
    )


def test_a_ragged_input_says_that_the_model_batches(folder: Path) -> None:
    made = MadeModel(x=(tf.float32, (None,)))
    with made as inputs:
        made.outputs["y"] = tf.identity(inputs["x"])
    ragged = ModelInput(name="x", data_type=FP32, dims=(-1,), allow_ragged_batch=True)
    assert complete(made, folder, replace(EMPTY, input=(ragged,))).max_batch_size == 4


def test_missing_inputs_are_added_and_listed_tensors_filled(folder: Path) -> None:
    listed = replace(EMPTY, input=(ModelInput(name="B"),), output=(ModelOutput(name="SUM"),))
    found = complete(sums(), folder, listed)
    assert found.input == tuple(ModelInput(name=n, data_type=FP32, dims=(16,)) for n in "BA")
    assert found.output == (ModelOutput(name="SUM", data_type=FP32, dims=(16,)),)


def test_targets_of_batch_inputs_are_not_added(folder: Path) -> None:
    derived = BatchInput(
        kind=BatchInputKind.BATCH_ELEMENT_COUNT,
        target_name=("B",),
        data_type=FP32,
        source_input=("A",),
    )
    found = complete(sums(), folder, replace(EMPTY, max_batch_size=4, batch_input=(derived,)))
    assert [each.name for each in found.input] == ["A"]


def test_inputs_of_sequences_are_not_added(folder: Path) -> None:
    config = parse(
        'sequence_batching { control_input { name: "B" control '
        "{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } } }",
        "m",
    )
    sequences = replace(EMPTY, sequence_batching=config.sequence_batching)
    found = complete(sums((None, 1)), folder, sequences)
    assert [each.name for each in found.input] == ["A"]
    assert found.dynamic_batching is None


def test_a_batch_of_scalars_has_a_reshape(folder: Path) -> None:
    found = complete(unchanged(shape=(None,)), folder)
    assert found.max_batch_size == 4
    for each in (*found.input, *found.output):
        assert (each.dims, each.reshape) == ((1,), TensorReshape())


def test_a_scalar_has_one_element(folder: Path) -> None:
    found = complete(unchanged(shape=()), folder)
    assert found.max_batch_size == 0
    for each in (*found.input, *found.output):
        assert (each.dims, each.reshape) == ((1,), None)


def test_tensors_of_unknown_rank_need_dims(folder: Path) -> None:
    saved = save(sums(UNKNOWN), folder)
    expected = "unable to autofill for 'm': the rank of model tensor"
    for listed, reason in (
        (EMPTY, "'A' is 0 and dimensions are not defined"),
        (replace(EMPTY, input=(ModelInput(name="A"),)), "'B' is 0 and dimensions are not defined"),
        (
            replace(EMPTY, input=tuple(ModelInput(name=n, dims=(2,)) for n in "AB")),
            "'DIFFERENCE' is 0 which is not supported",
        ),
    ):
        with pytest.raises(InferenceError) as caught:
            backend().complete(listed, saved)
        assert caught.value.message == f"{expected} {reason}"
    given = replace(
        EMPTY,
        input=tuple(ModelInput(name=n, dims=(2,)) for n in "AB"),
        output=(ModelOutput(name="SUM", dims=(2,)),),
    )
    found = backend().complete(given, saved)
    assert {each.data_type for each in (*found.input, *found.output)} == {FP32}


def test_a_graph_def_is_not_completed(folder: Path) -> None:
    assert backend().complete(GRAPH_DEF, save_graph_def(unchanged(), folder)) == GRAPH_DEF


@pytest.mark.parametrize(
    ("write", "name"), [(save, "model.savedmodel"), (save_graph_def, "model.graphdef")]
)
def test_a_config_is_drafted(
    folder: Path, write: Callable[[MadeModel, Path], Path], name: str
) -> None:
    made = draft(open_file(write(sums(), folder) / name), BackendLoader())
    config = normalise(parse(made.text, "m"), "m")
    check_tensors(config)
    assert (config.backend, config.max_batch_size) == ("tensorflow", 4)
    assert [(each.name, each.dims) for each in config.input] == [("A", (16,)), ("B", (16,))]
    assert [each.name for each in config.output] == ["DIFFERENCE", "SUM"]
