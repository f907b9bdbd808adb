"""Files that a config names: the model's, and libraries of custom operations; their state."""

import os
from collections.abc import Iterator
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError


def find_file(config: ModelConfig, folder: Path, default: str) -> Path:
    """The model's file in its version folder: the one that the config names, or `default`.

    In a folder of that name the file is `default`. Raises InferenceError UNAVAILABLE, as Triton, if
    it is missing, and INVALID_ARG for a name outside of the version folder.
    """
    file = file_below(folder, folder, config.default_model_filename or default, config)
    if file.is_dir():
        file = file / default
    if not file.is_file():
        shown = Path(folder.name, file.relative_to(folder))
        raise InferenceError(
            Code.UNAVAILABLE,
            f"unable to find '{shown}' for model instance '{config.name}'",
        )
    return file


def find_libraries(config: ModelConfig, folder: Path) -> list[Path]:
    """The libraries of custom operations, in the version folder or else in the model's.

    Raises InferenceError INVALID_ARG for one that is missing or outside: a client may send a
    config, and must not name a library of the host.
    """
    operations = config.model_operations
    names = operations.op_library_filename if operations else ()
    return [_find_library(config, folder, name) for name in names]


def _find_library(config: ModelConfig, folder: Path, name: str) -> Path:
    for place in (folder, folder.parent):
        found = file_below(folder.parent, place, name, config)
        if found.is_file():
            return found
    raise InferenceError(
        Code.INVALID_ARG,
        f"unable to find the library of custom operations '{name}' of model '{config.name}' in its "
        "folder or version folder",
    )


def file_below(outermost: Path, folder: Path, name: str, config: ModelConfig) -> Path:
    """The path of a name in `folder`; links may lead anywhere, names only below `outermost`.

    Raises InferenceError INVALID_ARG.
    """
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or not path.is_relative_to(outermost) or path == outermost:
        raise InferenceError(
            Code.INVALID_ARG,
            f"file '{name}' of model '{config.name}' is outside of the model's folder",
        )
    return path


FileStamp = tuple[str, int, int, int]
"""The path of a file, its inode, its time of change (ns), and its size."""


def file_stamps(folder: Path) -> frozenset[FileStamp]:
    """The stamps of all files of a version folder, links followed: other stamps, another model.

    A model is often more than the file that its config names: weights lie in files of their own.
    """
    return frozenset(_stamps(folder))


def _stamps(folder: Path) -> Iterator[FileStamp]:
    read: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        here = _status(place)
        if here is None or (here.st_dev, here.st_ino) in read:
            folders.clear()  # a link to a folder above would have no end
            continue
        read.add((here.st_dev, here.st_ino))
        for path in (os.path.join(place, name) for name in files):
            if status := _status(path):
                yield path, status.st_ino, status.st_mtime_ns, status.st_size


def _status(path: str) -> os.stat_result | None:
    """None for a file that has disappeared, and for a link that leads to none."""
    try:
        return os.stat(path)
    except OSError:
        return None
