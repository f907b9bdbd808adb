"""What a program gives along to load a model (model repository extension, load parameters)."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.models.upload import FILE_PREFIX, Override

CONFIG = "config"


def read_override(parameters: Mapping[str, Any] | None) -> Override | None:
    """`config` as JSON text or a mapping, files as bytes; INVALID_ARG for anything else."""
    if not parameters:
        return None
    if not isinstance(parameters, Mapping):
        raise InferenceError(
            Code.INVALID_ARG,
            f"load parameters are {type(parameters).__name__}, expected a mapping from names to "
            "values",
        )
    config, files = None, {}
    for name, value in parameters.items():
        if name == CONFIG and isinstance(value, str | Mapping):
            config = value if isinstance(value, str) else _json(value)
        elif str(name).startswith(FILE_PREFIX) and isinstance(value, bytes):
            files[name] = value
        else:
            raise InferenceError(
                Code.INVALID_ARG,
                f"load parameter '{name}' is {type(value).__name__}, expected '{CONFIG}' with JSON "
                f"text or a mapping, or '{FILE_PREFIX}<path>' with bytes",
            )
    return Override(config, files)


def _json(config: Mapping[str, Any]) -> str:
    try:
        return json.dumps(config)
    except (TypeError, ValueError) as error:
        raise InferenceError(
            Code.INVALID_ARG, f"load parameter '{CONFIG}' cannot be written as JSON: {error}"
        ) from None
