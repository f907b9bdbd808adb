"""What do `model.yaml` or `model.json`, and `multi_lora.json`, of a version folder say?"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .refusals import Refusal, clean

YAML, JSON, ADAPTERS = "model.yaml", "model.json", "multi_lora.json"
OF_TRITON = "triton_config"
"""The key that is Triton's; all others are arguments of `LLM`."""
KNOWN_OF_TRITON = frozenset({"max_batch_size", "decoupled", "cancellation_check_period_ms"})


@dataclass(frozen=True)
class ModelFile:
    """`arguments` go to `LLM`; `name` is the file they come from, for messages.

    `max_batch_size` and `decoupled` are None where the file says nothing of them.
    """

    name: str
    arguments: Mapping[str, Any]
    max_batch_size: int | None = None
    decoupled: bool | None = None
    check_secs: float = 0.1
    adapters: Mapping[str, str] = field(default_factory=dict)


def read_model_file(folder: Path, stored: str = "") -> ModelFile:
    """The file of this folder; Refusal says what is wrong with it, or why it cannot be read.

    A folder that is itself a model of Hugging Face's needs no file. `stored` is the folder
    of the model that the config names, in the place of a `model`.
    """
    try:
        return _read(folder, stored)
    except OSError as error:
        name = Path(str(error.filename or folder)).name
        raise Refusal(f"its {name} cannot be read: {error.strerror}") from None


def _read(folder: Path, stored: str) -> ModelFile:
    path = next((found for name in (YAML, JSON) if (found := folder / name).is_file()), None)
    if path is None and (folder / "config.json").is_file():
        return ModelFile(name="config.json", arguments={"model": str(folder)})
    if path is None:
        raise Refusal(
            f"its version folder '{folder.name}' has no {YAML} or {JSON} with the arguments of "
            "tensorrt_llm.LLM, such as `model: Qwen/Qwen3-8B` (engines that trtllm-build has made, "
            "and the parameter 'gpt_model_path', are not served)"
        )
    arguments = _mapping(_parsed(path), path.name)
    triton = _mapping(arguments.pop(OF_TRITON, None) or {}, f"'{OF_TRITON}' of {path.name}")
    arguments["model"] = _source(arguments.get("model") or stored, folder, path.name)
    if unknown := triton.keys() - KNOWN_OF_TRITON:
        raise Refusal(
            f"its {path.name} has the key '{sorted(unknown)[0]}' in {OF_TRITON}, expected one of "
            f"{', '.join(sorted(KNOWN_OF_TRITON))}"
        )
    return ModelFile(
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
            raise Refusal(f"its {JSON} is not valid JSON: {error}") from None
    try:
        import yaml  # in the environment of the library, but not in every other
    except ImportError:
        raise Refusal(
            f"its {YAML} cannot be read: its environment has no PyYAML; add it, or write {JSON}",
            "UNAVAILABLE",
        ) from None
    try:
        return yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise Refusal(f"its {YAML} is not valid YAML: {clean(error)}") from None


def _mapping(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Refusal(f"its {what} must be a mapping of names, found {type(found).__name__}")
    return dict(found)


def _source(source: Any, folder: Path, file: str) -> str:
    """The folder of that name in the version folder, else the name as it is."""
    if not isinstance(source, str) or not source:
        raise Refusal(f"its {file} must name a model: the key 'model' is missing or no text")
    inside = folder / source
    return str(inside) if (inside / "config.json").is_file() else source


def _said(triton: Mapping[str, Any], key: str, kind: type, file: str) -> Any:
    found = triton.get(key)
    if found is None or type(found) is kind:
        return found
    expected = "true or false" if kind is bool else "an integer"
    raise Refusal(f"its {file} has {OF_TRITON}.{key} {found!r}, expected {expected}")


def _adapters(folder: Path) -> Mapping[str, str]:
    """Names and folders; those that are relative lie in the version folder."""
    path = folder / ADAPTERS
    if not path.is_file():
        return {}
    try:
        found = _mapping(json.loads(path.read_bytes()), ADAPTERS)
    except ValueError as error:
        raise Refusal(f"its {ADAPTERS} is not valid JSON: {error}") from None
    return {name: str(folder / str(place)) for name, place in found.items()}
