"""From a model folder of the backend `vllm` to the flags of vLLM's own server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests.server import ServerFailed


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model of a repository: its name there, and the flags that make vLLM serve the same."""

    name: str
    flags: Sequence[str]


def read_model(folder: Path) -> EngineModel:
    """Read `1/model.json` of a model folder, and look for the model where the gateway does.

    ServerFailed if there is none.
    """
    version = folder / "1"
    try:
        arguments: dict[str, Any] = orjson.loads((version / "model.json").read_bytes())
    except FileNotFoundError as error:
        raise ServerFailed(f"no model of backend vllm: '{error.filename}' is missing") from None
    source = arguments["model"]
    for place in (version, default_root(ENVIRONMENT)):
        if (place / source / "config.json").is_file():
            arguments["model"] = str((place / source).resolve())
    return EngineModel(folder.name, engine_flags(arguments))


def engine_flags(arguments: Mapping[str, Any]) -> Sequence[str]:
    """Engine arguments as flags; structures become JSON."""
    return [part for name, value in arguments.items() for part in _flag(name, value)]


def _flag(name: str, value: Any) -> Sequence[str]:
    dashed = name.replace("_", "-")
    if value is None:
        return ()
    if isinstance(value, bool):
        return (f"--{dashed}" if value else f"--no-{dashed}",)
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        return (f"--{dashed}", *map(str, value))
    text = orjson.dumps(value).decode() if isinstance(value, list | dict) else str(value)
    return (f"--{dashed}", text)
