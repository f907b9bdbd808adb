"""Completing a config, and where model.py and the config disagree (python backend, 2.2)."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from backends.python.worker.sluice_worker.model_config import ModelConfig

BASE = {
    "name": "m",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [16], "optional": False}],
    "output": [{"name": "y", "data_type": "TYPE_INVALID", "dims": []}],
}
X = {"name": "x", "data_type": "TYPE_FP32", "dims": [16]}
IN = "in auto-complete-config function for model 'm'"


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(json.dumps({**BASE, **fields}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda it: it.set_max_batch_size(4),
            "configuration specified max_batch_size 8, but in auto-complete-config function for "
            "model 'm' specified max_batch_size 4",
        ),
        (
            lambda it: it.add_input({**X, "shape": 1}),
            f"input 'x' {IN} contains property other than 'name', 'data_type', 'dims' and "
            "'optional'.",
        ),
        (
            lambda it: it.add_output({**X, "optional": True}),
            f"output 'x' {IN} contains property other than 'name', 'data_type' and 'dims'.",
        ),
        (lambda it: it.add_input({"dims": [1]}), f"input {IN} is missing 'name' property."),
        (
            lambda it: it.add_input({"name": "x", "dims": [1]}),
            f"input 'x' {IN} is missing 'data_type' property.",
        ),
        (
            lambda it: it.add_output({"name": "y", "data_type": "TYPE_FP32"}),
            f"output 'y' {IN} is missing 'dims' property.",
        ),
        (
            lambda it: it.add_input({**X, "data_type": "TYPE_INT8"}),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'x', "
            "model provides TYPE_INT8",
        ),
        (
            lambda it: it.add_input({**X, "dims": [4, 2]}),
            "model 'm', tensor 'x': the model expects dims [4, 2] but the model configuration "
            "specifies dims [16]",
        ),
        (
            lambda it: it.add_input({**X, "optional": True}),
            "model 'm', tensor 'x': the model expects optional True but the model configuration "
            "specifies optional False",
        ),
        (
            lambda it: it.set_model_transaction_policy({"coupled": True}),
            "model transaction property in auto-complete-config function for model 'm' contains "
            "property other than 'decoupled'.",
        ),
    ],
)
def test_conflicts_with_the_config_are_refused(
    change: Callable[[ModelConfig], None], message: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        change(config())
    assert str(caught.value) == message


def test_a_decoupled_model_stays_as_it_is_configured() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        config(model_transaction_policy={"decoupled": False}).set_model_transaction_policy(
            {"decoupled": True}
        )
    assert str(caught.value) == (
        "trying to change decoupled property in auto-complete-config for model 'm', which is "
        "already set to 'False'."
    )


@pytest.mark.parametrize("other", ["sequence_batching", "ensemble_scheduling"])
def test_another_scheduler_stays(other: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        config(**{other: {}}).set_dynamic_batching()
    assert str(caught.value) == (
        f"Configuration specified scheduling_choice as '{other}', but auto-complete-config "
        "function for model 'm' tries to set scheduling_choice as 'dynamic_batching'"
    )


def test_missing_fields_of_a_config_are_completed() -> None:
    changed = config()
    changed.set_max_batch_size(16)
    changed.set_dynamic_batching()
    changed.add_input(X)
    changed.add_input({"name": "w", "data_type": "TYPE_INT8", "dims": [1], "optional": True})
    changed.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [2]})
    changed.set_model_transaction_policy({"decoupled": True})
    changed.set_model_transaction_policy({"decoupled": True})
    found = json.loads(changed.text())
    assert found == changed.as_dict()
    assert found["max_batch_size"] == 16
    assert found["dynamic_batching"] == {}
    assert [each["name"] for each in found["input"]] == ["x", "w"]
    assert found["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}]
    assert found["model_transaction_policy"] == {"decoupled": True}


def test_configured_batching_is_kept() -> None:
    changed = config(dynamic_batching={"max_queue_delay_microseconds": 5})
    changed.set_dynamic_batching()
    assert changed.as_dict()["dynamic_batching"] == {"max_queue_delay_microseconds": 5}


def test_the_dictionary_is_a_copy() -> None:
    changed = config()
    changed.as_dict()["input"].clear()
    assert len(changed.as_dict()["input"]) == 1
