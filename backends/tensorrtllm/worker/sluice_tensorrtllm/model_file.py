"""Files of a version folder: `model.yaml` or `model.json`, and `multi_lora.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_llm.request import LORA_NAME, LlmRequest, Mistake, clean

YAML, JSON, ADAPTERS = "model.yaml", "model.json", "multi_lora.json"
OF_TRITON = "triton_config"
"""The key that is Triton's; all others are arguments of `LLM`."""
KNOWN_OF_TRITON = frozenset({"max_batch_size", "decoupled", "cancellation_check_period_ms"})


@dataclass(frozen=True)
class LlmModelFile:
    """`arguments` go to `LLM`; `name` is their file, for messages.

    `max_batch_size` and `decoupled` are None if the file does not set them.
    """

    name: str
    arguments: Mapping[str, Any]
    max_batch_size: int | None = None
    decoupled: bool | None = None
    check_secs: float = 0.1
    adapters: Mapping[str, str] = field(default_factory=dict)


def read_model_file(folder: Path, stored: str = "") -> LlmModelFile:
    """The file of this folder; Mistake if it is invalid or cannot be read.

    A folder that is itself a model of Hugging Face's needs no file. `stored` is the folder
    of the model that the config names, in the place of a `model`.
    """
    try:
        return _read(folder, stored)
    except OSError as error:
        name = Path(str(error.filename or folder)).name
        raise Mistake(f"its {name} cannot be read: {error.strerror}") from None


def _read(folder: Path, stored: str) -> LlmModelFile:
    path = next((found for name in (YAML, JSON) if (found := folder / name).is_file()), None)
    if path is None and (folder / "config.json").is_file():
        return LlmModelFile(name="config.json", arguments={"model": str(folder)})
    if path is None:
        raise Mistake(
            f"its version folder '{folder.name}' has no {YAML} or {JSON} with the arguments of "
            "tensorrt_llm.LLM, such as `model: Qwen/Qwen3-8B` (engines that trtllm-build has made, "
            "and the parameter 'gpt_model_path', are not served)"
        )
    arguments = _mapping(_parsed(path), path.name)
    triton = _mapping(arguments.pop(OF_TRITON, None) or {}, f"'{OF_TRITON}' of {path.name}")
    arguments["model"] = _source(arguments.get("model") or stored, folder, path.name)
    if unknown := triton.keys() - KNOWN_OF_TRITON:
        raise Mistake(
            f"its {path.name} has the key '{sorted(unknown)[0]}' in {OF_TRITON}, expected one of "
            f"{', '.join(sorted(KNOWN_OF_TRITON))}"
        )
    return LlmModelFile(
        name=path.name,
        arguments=arguments,
        max_batch_size=_said(triton, "max_batch_size", int, path.name),
        decoupled=_said(triton, "decoupled", bool, path.name),
        check_secs=(_said(triton, "cancellation_check_period_ms", int, path.name) or 100) / 1000,
        adapters=_adapters(folder),
    )


def _parsed(path: Path) -> Any:
    if path.name == JSON:
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise Mistake(f"its {JSON} is not valid JSON: {error}") from None
    try:
        import yaml  # present in the library's environment, but not in every other
    except ImportError:
        raise Mistake(
            f"its {YAML} cannot be read: its environment has no PyYAML; add it, or write {JSON}",
            "UNAVAILABLE",
        ) from None
    try:
        return yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise Mistake(f"its {YAML} is not valid YAML: {clean(error)}") from None


def _mapping(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Mistake(f"its {what} must be a mapping of names, found {type(found).__name__}")
    return dict(found)


def _source(source: Any, folder: Path, file: str) -> str:
    """The folder of that name in the version folder, else the name as it is."""
    if not isinstance(source, str) or not source:
        raise Mistake(f"its {file} must name a model: the key 'model' is missing or no text")
    inside = folder / source
    return str(inside) if (inside / "config.json").is_file() else source


def _said(triton: Mapping[str, Any], key: str, kind: type, file: str) -> Any:
    found = triton.get(key)
    if found is None or type(found) is kind:
        return found
    expected = "true or false" if kind is bool else "an integer"
    raise Mistake(f"its {file} has {OF_TRITON}.{key} {found!r}, expected {expected}")


def _adapters(folder: Path) -> Mapping[str, str]:
    """Names and folders; relative ones are in the version folder."""
    path = folder / ADAPTERS
    if not path.is_file():
        return {}
    try:
        found = _mapping(json.loads(path.read_bytes()), ADAPTERS)
    except ValueError as error:
        raise Mistake(f"its {ADAPTERS} is not valid JSON: {error}") from None
    return {name: str(folder / str(place)) for name, place in found.items()}


class AdapterRequests:
    """The LoRA adapters of `multi_lora.json`, by name or by number from 1 on (`lora_task_id`)."""

    def __init__(self, file: LlmModelFile, request_class: Any) -> None:
        self.names = list(file.adapters)
        self._paths = file.adapters
        self._request_class = request_class
        arguments = file.arguments
        self._enabled = bool(arguments.get("enable_lora") or arguments.get("lora_config"))

    def take(self, llm_request: LlmRequest, sampling: dict[str, Any]) -> Any:
        """Move the adapter out of the sampling: the library's request for it, None without one."""
        name, number = sampling.pop(LORA_NAME, None), llm_request.lora_number
        if name is None and number is None:
            return None
        if name is not None and not isinstance(name, str):
            raise Mistake(f"'{LORA_NAME}' is {name!r}, expected a name")
        if not self._enabled:
            raise Mistake("LoRA feature is not enabled.")
        if name is None:
            name = self._named(number)
        if name not in self._paths:
            raise Mistake(f"LoRA {name} is not supported, we currently support {self.names}")
        return self._request_class(name, self.names.index(name) + 1, self._paths[name])

    def _named(self, number: int | None) -> str:
        if number is None or not 1 <= number <= len(self.names):
            raise Mistake(
                f"'lora_task_id' is {number}, expected a number from 1 to {len(self.names)}: the "
                "adapters of multi_lora.json, in its order"
            )
        return self.names[number - 1]
