"""The config as model.py completes it and looks it up."""

import copy
import json
from collections.abc import Mapping
from typing import Any

REQUIRED = ("name", "data_type", "dims")


class ModelConfig:
    """A config to complete; ValueError names a conflict between model.py and the config."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """A copy of the config."""
        return copy.deepcopy(self._config)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch in rows; not below the configured one."""
        configured = self._config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config "
                f"function for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Set dynamic batching; ValueError if another scheduler is configured."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but "
                    f"auto-complete-config function for model '{self._name}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input, or complete a configured one; it may be `optional`."""
        self._check("input", input, (*REQUIRED, "optional"))
        configured = self._find("input", input)
        if configured is None:
            self._config.setdefault("input", []).append(dict(input))
            return
        self._check_same("input", configured, input)
        self._check_optional(configured, input)
        configured.update(input)

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete a configured one."""
        self._check("output", output, REQUIRED)
        configured = self._find("output", output)
        if configured is None:
            self._config.setdefault("output", []).append(dict(output))
            return
        self._check_same("output", configured, output)
        configured.update(output)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether the model is decoupled."""
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name}' contains property other than 'decoupled'."
            )
        policy = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.setdefault("decoupled", decoupled) != decoupled:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )

    def text(self) -> str:
        """The config as JSON text."""
        return json.dumps(self._config)

    @property
    def _name(self) -> str:
        return str(self._config.get("name", ""))

    def _find(self, kind: str, given: Mapping[str, Any]) -> Any:
        for each in self._config.get(kind, ()):
            if each["name"] == given["name"]:
                return each
        return None

    def _check(self, kind: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
        which = f"{kind} '{given['name']}'" if "name" in given else kind
        where = f"{which} in auto-complete-config function for model '{self._name}'"
        if set(given) - set(known):
            names = [f"'{each}'" for each in known]
            listed = f"{', '.join(names[:-1])} and {names[-1]}"
            raise ValueError(f"{where} contains property other than {listed}.")
        for each in REQUIRED:
            if each not in given:
                raise ValueError(f"{where} is missing '{each}' property.")

    def _check_same(
        self, kind: str, configured: Mapping[str, Any], given: Mapping[str, Any]
    ) -> None:
        data_type = configured.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", given["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {data_type} "
                f"for {kind} '{given['name']}', model provides {given['data_type']}"
            )
        dims = configured.get("dims")
        if dims and dims != given["dims"]:
            raise ValueError(
                f"model '{self._name}', tensor '{given['name']}': the model expects dims "
                f"{given['dims']} but the model configuration specifies dims {dims}"
            )

    def _check_optional(self, configured: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        found, wanted = configured.get("optional"), given.get("optional")
        if found is not None and wanted is not None and found != wanted:
            raise ValueError(
                f"model '{self._name}', tensor '{given['name']}': the model expects optional "
                f"{wanted} but the model configuration specifies optional {found}"
            )


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of an input; None without one of that name."""
    return _entry(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of an output; None without one of that name."""
    return _entry(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether the model is decoupled."""
    if "model_transaction_policy" not in model_config:
        return False
    return bool(model_config["model_transaction_policy"]["decoupled"])


def _entry(entries: Any, name: str) -> Any:
    for entry in entries:
        if entry["name"] == name:
            return entry
    return None
