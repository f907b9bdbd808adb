"""Where in its version folder is the model, and where are its libraries?"""

import os
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

DEFAULT = "model.onnx"


def find_model(config: ModelConfig, folder: Path) -> Path:
    """The model's file: the one that the config names, or `model.onnx` in a folder of that name.

    Raises InferenceError UNAVAILABLE, as Triton, if there is none, and INVALID_ARG for a name
    that leads out of the version folder.
    """
    name = config.default_model_filename or DEFAULT
    file = _below(folder, folder, name, config)
    if file.is_dir():
        file = file / DEFAULT
    if not file.is_file():
        shown = Path(folder.name, file.relative_to(folder))
        raise InferenceError(
            Code.UNAVAILABLE,
            f"unable to find '{shown}' for model instance '{config.name}'",
        )
    return file


def find_libraries(config: ModelConfig, folder: Path) -> list[Path]:
    """The libraries of custom operations, in the version folder or else in the model's.

    Raises InferenceError INVALID_ARG for one that is not there or that lies elsewhere: a config
    may come from a client, and may not name any library of the host.
    """
    operations = config.model_operations
    names = operations.op_library_filename if operations else ()
    return [_find_library(config, folder, name) for name in names]


def _find_library(config: ModelConfig, folder: Path, name: str) -> Path:
    for place in (folder, folder.parent):
        found = _below(folder.parent, place, name, config)
        if found.is_file():
            return found
    raise InferenceError(
        Code.INVALID_ARG,
        f"unable to find the library of custom operations '{name}' of model '{config.name}' in its "
        "folder or version folder",
    )


def _below(outermost: Path, folder: Path, name: str, config: ModelConfig) -> Path:
    """The path that the name stands for in `folder`; links may lead anywhere, names may not."""
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or not path.is_relative_to(outermost) or path == outermost:
        raise InferenceError(
            Code.INVALID_ARG,
            f"file '{name}' of model '{config.name}' is outside of the model's folder",
        )
    return path
