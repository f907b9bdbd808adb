"""Flags of vLLM's own server, from a model folder of the backend `vllm`."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from backends.vllm.settings import OpenAiSettings, read_openai_settings
from gateway.config.pbtxt import parse
from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from loadtests.support.servers import ServerFailed

ASK_SECS = 120
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model of a repository: its name there, and the flags that make vLLM serve the same."""

    name: str
    flags: Sequence[str]


def read_model(folder: Path, defaults: Mapping[str, Any] = NO_DEFAULTS) -> EngineModel:
    """Read `1/model.json` and the config of a model folder.

    `defaults` are the gateway's own for arguments that the file leaves open. The model is looked
    for where the gateway does. ServerFailed if there is none.
    """
    version = folder / "1"
    try:
        arguments: dict[str, Any] = orjson.loads((version / "model.json").read_bytes())
        arguments = {**defaults, **arguments}
        config = parse((folder / "config.pbtxt").read_text(), folder.name)
    except FileNotFoundError as error:
        raise ServerFailed(f"no model of backend vllm: '{error.filename}' is missing") from None
    source = arguments["model"]
    for place in (version, default_root(ENVIRONMENT)):
        if (place / source / "config.json").is_file():
            arguments["model"] = str((place / source).resolve())
    settings = read_openai_settings(config, version)
    return EngineModel(folder.name, (*engine_flags(arguments), *openai_flags(settings)))


def gateway_defaults() -> Mapping[str, Any]:
    """The gateway's own arguments for an engine on this machine, found in a process that ends."""
    program = (
        "import json; from backends.vllm.machine import engine_defaults; "
        "print(json.dumps(engine_defaults()))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=ASK_SECS)
    found: dict[str, Any] = orjson.loads(ended.stdout.splitlines()[-1])
    return found


def openai_flags(settings: OpenAiSettings) -> Sequence[str]:
    """How OpenAI's requests are served; parsers decide which chunks there are."""
    flags = {
        "chat_template": settings.chat_template,
        "tool_call_parser": settings.tool_call_parser or None,
        "enable_auto_tool_choice": True if settings.tool_call_parser else None,
        "reasoning_parser": settings.reasoning_parser or None,
    }
    return engine_flags(flags)


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
