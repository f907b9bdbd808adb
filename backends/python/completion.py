"""What a model's `auto_complete_config` says of its configuration."""

from pathlib import Path
from typing import Any

import orjson

from gateway.config import ModelConfig
from gateway.config.pbtxt import parse_json, to_json
from gateway.errors import Code, InferenceError


def config_json(config: ModelConfig) -> str:
    """A config as models see it: the JSON form of the model configuration extension."""
    return orjson.dumps(to_json(config)).decode()


def complete_message(config: ModelConfig, path: Path, home: Path | None) -> dict[str, Any]:
    """What COMPLETE says; `path` is the version folder, `home` that of a Python-based backend."""
    return {
        "model_config": config_json(config),
        "model_name": config.name,
        "path": str(path.absolute()),
        "backend_path": "" if home is None else str(home.absolute()),
    }


def completed_config(config: ModelConfig, said: str | None) -> ModelConfig:
    """The config with what the model says of it; None if it says nothing."""
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
