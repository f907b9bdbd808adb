"""The LoRA adapters of a model: those of `multi_lora.json`, and no others."""

from typing import Any

from .asked import Asked
from .model_file import ModelFile
from .refusals import Refusal

PARAMETER = "lora_name"


class Adapters:
    """Chooses the adapter of a request, by its name or its number from 1 on (`lora_task_id`)."""

    def __init__(self, file: ModelFile, request_class: Any) -> None:
        self.names = list(file.adapters)
        self._paths = file.adapters
        self._request_class = request_class
        arguments = file.arguments
        self._enabled = bool(arguments.get("enable_lora") or arguments.get("lora_config"))

    def take(self, asked: Asked, sampling: dict[str, Any]) -> Any:
        """The library's request for it, taken out of the sampling; None if none is asked for."""
        name, number = sampling.pop(PARAMETER, None), asked.lora_number
        if name is None and number is None:
            return None
        if name is not None and not isinstance(name, str):
            raise Refusal(f"'{PARAMETER}' is {name!r}, expected a name")
        if not self._enabled:
            raise Refusal("LoRA feature is not enabled.")
        if name is None:
            name = self._named(number)
        if name not in self._paths:
            raise Refusal(f"LoRA {name} is not supported, we currently support {self.names}")
        return self._request_class(name, self.names.index(name) + 1, self._paths[name])

    def _named(self, number: int | None) -> str:
        if number is None or not 1 <= number <= len(self.names):
            raise Refusal(
                f"'lora_task_id' is {number}, expected a number from 1 to {len(self.names)}: the "
                "adapters of multi_lora.json, in its order"
            )
        return self.names[number - 1]
