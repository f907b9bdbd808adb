"""LoRA adapters of a model, from `multi_lora.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.errors import Code, InferenceError

FILE = "multi_lora.json"
ENABLED = "enable_lora"
PARAMETER = "lora_name"


class LoraRefusal(InferenceError):
    """The error of a request with an unknown adapter; its text is Triton's, without a prefix."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARG, message)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One adapter; its number is its place in the file, from 1."""

    number: int
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LoraAdapters:
    """The adapters of a model by name; None if the model has LoRA disabled."""

    by_name: Mapping[str, LoraAdapter] | None = None

    def select(self, name: Any) -> LoraAdapter:
        """The adapter of that name; raises LoraRefusal if there is none."""
        if self.by_name is None:
            raise LoraRefusal("LoRA feature is not enabled.")
        adapter = self.by_name.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise LoraRefusal(
                f"LoRA {name} is not supported, we currently support {list(self.by_name)}"
            )
        return adapter


def read_adapters(folder: Path, *, model: str) -> LoraAdapters:
    """Read `multi_lora.json` of the version folder; paths are relative to that folder."""
    try:
        content = orjson.loads((folder / FILE).read_bytes())
    except FileNotFoundError:
        raise _invalid(model, f"'{ENABLED}' is set, but its version folder has no {FILE}") from None
    except orjson.JSONDecodeError as error:
        raise _invalid(model, f"its {FILE} is not valid JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(p, str) for p in content.values()):
        raise _invalid(model, f"its {FILE} must be an object of adapter names and their folders")
    adapters = (
        LoraAdapter(number, name, str(folder / path))
        for number, (name, path) in enumerate(content.items(), start=1)
    )
    return LoraAdapters({adapter.name: adapter for adapter in adapters})


def _invalid(model: str, message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"model '{model}': {message}")
