"""Fields of a config that a backend may complete."""

from dataclasses import replace

import pytest

from gateway.config import InstanceGroup, ModelInput, TransactionPolicy
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching, SequenceBatching
from gateway.errors import Code, InferenceError
from gateway.models.normalisation import completed
from tests.builders import TEXT

OTHER = ModelInput(name="other", data_type=DataType.TYPE_FP32, dims=(3,))


def test_a_backend_completes_inputs_outputs_and_batching() -> None:
    said = replace(
        TEXT,
        max_batch_size=8,
        input=(OTHER,),
        dynamic_batching=DynamicBatching(),
        model_transaction_policy=TransactionPolicy(decoupled=True),
    )
    found = completed(TEXT, said)
    assert (found.max_batch_size, found.input, found.decoupled) == (8, (OTHER,), True)
    assert found.dynamic_batching == DynamicBatching(preferred_batch_size=(8,))


def test_other_fields_of_a_backend_are_ignored() -> None:
    said = replace(
        TEXT,
        name="other",
        backend="other",
        instance_group=(InstanceGroup(count=9),),
        default_model_filename="x",
        parameters={"key": "value"},
    )
    found = completed(TEXT, said)
    assert (found.name, found.backend, found.instance_group) == ("text", "identity", ())
    assert (found.default_model_filename, found.parameters) == ("", {})


def test_a_scheduling_choice_stays_as_it_was_configured() -> None:
    config = replace(TEXT, max_batch_size=4, dynamic_batching=DynamicBatching())
    said = replace(config, dynamic_batching=DynamicBatching(max_queue_delay_microseconds=5))
    batching = completed(config, said).dynamic_batching
    assert batching == DynamicBatching(preferred_batch_size=(4,))


@pytest.mark.parametrize(
    ("said", "name"),
    [(None, "none"), (SequenceBatching(), "sequence_batching")],
)
def test_a_scheduling_choice_cannot_be_changed(said: SequenceBatching | None, name: str) -> None:
    config = replace(TEXT, max_batch_size=4, dynamic_batching=DynamicBatching())
    with pytest.raises(InferenceError) as caught:
        completed(config, replace(config, dynamic_batching=None, sequence_batching=said))
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == (
        f"Cannot update scheduling choice from dynamic_batching to {name} when auto-completing."
    )


def test_a_config_that_stays_incomplete_is_refused() -> None:
    with pytest.raises(InferenceError, match="model input 'i' must specify 'data_type' for text"):
        completed(TEXT, replace(TEXT, input=(ModelInput(name="i"),)))
