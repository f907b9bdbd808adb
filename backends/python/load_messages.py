"""Messages that load a model, or complete its config."""

import hashlib
from pathlib import Path
from typing import Any

import orjson

from gateway.backend import ModelContext
from gateway.config import ModelConfig
from gateway.config.pbtxt import parse_json, to_json
from gateway.errors import Code, InferenceError

DEFAULT_FILE = "model.py"
STORED_MODEL = "stored_model"
"""A parameter of a model; in the args of `initialize` it is the folder of that stored model."""
FIRST_VERSION = 1


def version_of(path: Path) -> int:
    """The number of a version by its folder; a model of the store has only one."""
    return int(path.name) if path.name.isdecimal() else FIRST_VERSION


def instance_name(context: ModelContext) -> str:
    """The instance's name in errors and log lines."""
    return context.name or f"{context.config.name}_0"


def load_message(context: ModelContext, home: Path | None) -> dict[str, Any]:
    """The content of LOAD; `home` is the folder of a Python-based backend."""
    path = context.path.absolute()
    return {
        "args": {
            **_stored(context),
            "model_config": config_json(context.config),
            "model_instance_kind": context.group.kind.removeprefix("KIND_"),
            "model_instance_name": instance_name(context),
            "model_instance_device_id": str(context.device),
            "model_repository": str(path.parent),
            "model_version": str(version_of(path)),
            "model_name": context.config.name,
        },
        "path": str(path),
        "backend_path": "" if home is None else str(home.absolute()),
        "decoupled": context.config.decoupled,
    }


def _stored(context: ModelContext) -> dict[str, str]:
    """The folder of the stored model that the config names; the gateway has checked it."""
    name = context.config.parameters.get(STORED_MODEL)
    return {} if name is None else {STORED_MODEL: str(context.store.absolute() / name)}


def code_identity(config: ModelConfig, path: Path, home: Path | None) -> bytes:
    """An identity of the state of a model's code."""
    file = home / DEFAULT_FILE if home else path / (config.default_model_filename or DEFAULT_FILE)
    changed = file.stat().st_mtime_ns if file.exists() else 0
    return hashlib.blake2b(repr((config.name, str(file), changed)).encode()).digest()


def config_json(config: ModelConfig) -> str:
    """A config in the JSON form of the model configuration extension."""
    return orjson.dumps(to_json(config)).decode()


def complete_message(config: ModelConfig, path: Path, home: Path | None) -> dict[str, Any]:
    """The content of COMPLETE; `home` is the folder of a Python-based backend."""
    return {
        "model_config": config_json(config),
        "model_name": config.name,
        "path": str(path.absolute()),
        "backend_path": "" if home is None else str(home.absolute()),
    }


def completed_config(config: ModelConfig, said: str | None) -> ModelConfig:
    """The config that the model has completed; `said` is None if it completes nothing."""
    if said is None:
        return config
    try:
        return parse_json(said)
    except InferenceError as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"auto_complete_config function in model '{config.name}' returned no model "
            f"configuration: {error.message}",
        ) from None
