"""Where in its version folder is the plan for a GPU?"""

import os
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

DEFAULT = "model.plan"


def find_plan(config: ModelConfig, folder: Path, capability: str) -> Path:
    """The plan that the config names for GPUs of that compute capability, or for all.

    Raises InferenceError UNAVAILABLE, as Triton, if there is none, and INVALID_ARG for a name
    that leads out of the version folder.
    """
    default = config.default_model_filename or DEFAULT
    name = config.cc_model_filenames.get(capability, default)
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or not path.is_relative_to(folder) or path == folder:
        raise InferenceError(
            Code.INVALID_ARG,
            f"file '{name}' of model '{config.name}' is outside of the model's version folder",
        )
    if not path.is_file():
        raise InferenceError(
            Code.UNAVAILABLE,
            f"unable to find '{folder.name}/{name}' for model instance '{config.name}'",
        )
    return path
