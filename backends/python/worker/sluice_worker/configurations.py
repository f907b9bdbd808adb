"""What model.py looks up in the config that `initialize` is given."""

from collections.abc import Mapping
from typing import Any


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of an input, None if there is none of that name."""
    return _entry(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of an output, None if there is none of that name."""
    return _entry(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the model answers with any number of responses."""
    if "model_transaction_policy" not in model_config:
        return False
    return bool(model_config["model_transaction_policy"]["decoupled"])


def _entry(entries: Any, name: str) -> Any:
    for entry in entries:
        if entry["name"] == name:
            return entry
    return None
