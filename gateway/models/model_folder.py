"""The state of a model's folder, to see whether any file in it has changed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

Snapshot = Mapping[str, tuple[int, int]]
"""When each file was modified (ns), and its size; by its path in the folder. Folders have -1."""

CONFIG_FOLDER = "configs/"
CONFIG_FILE = "config.pbtxt"


def take(folder: Path) -> Snapshot:
    """What is in the folder at this moment; what vanishes meanwhile is left out."""
    found: dict[str, tuple[int, int]] = {}
    unread = [_Folder(folder, "", frozenset())]
    while unread:  # a folder may be deeper than Python's recursion
        unread += _read(unread.pop(), found)
    return found


def without_configs(snapshot: Snapshot) -> Snapshot:
    """The files that are no configuration."""
    return {
        name: stamp
        for name, stamp in snapshot.items()
        if name != CONFIG_FILE and not name.startswith(CONFIG_FOLDER)
    }


class _Folder(NamedTuple):
    """A folder to read; `above` are the folders that lead to it, by device and inode."""

    path: Path
    prefix: str
    above: frozenset[tuple[int, int]]


def _read(folder: _Folder, found: dict[str, tuple[int, int]]) -> list[_Folder]:
    """Add the stamps of a folder's entries; returns the folders in it.

    Links are followed, but not back to a folder above.
    """
    try:
        here = os.stat(folder.path)
        entries = list(os.scandir(folder.path))
    except OSError:
        return []
    itself = (here.st_dev, here.st_ino)
    if itself in folder.above:
        return []
    folders: list[_Folder] = []
    for entry in entries:
        try:
            status, is_folder = entry.stat(), entry.is_dir()
        except OSError:
            continue
        name = f"{folder.prefix}{entry.name}"
        if is_folder:
            found[f"{name}/"] = (0, -1)
            folders.append(_Folder(folder.path / entry.name, f"{name}/", folder.above | {itself}))
        else:
            found[name] = (status.st_mtime_ns, status.st_size)
    return folders
