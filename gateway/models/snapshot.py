"""Has anything in a model's folder changed since it was last looked at?"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

Snapshot = Mapping[str, tuple[int, int]]
"""When each file was modified (ns), and its size; by its path in the folder. Folders have -1."""

CONFIG_FOLDER = "configs/"
CONFIG_FILE = "config.pbtxt"


def take(folder: Path) -> Snapshot:
    """What is in the folder at this moment; what vanishes meanwhile is left out."""
    return dict(_stamps(folder, "", frozenset()))


def without_configs(snapshot: Snapshot) -> Snapshot:
    """The files that are no configuration."""
    return {
        name: stamp
        for name, stamp in snapshot.items()
        if name != CONFIG_FILE and not name.startswith(CONFIG_FOLDER)
    }


def _stamps(
    folder: Path, prefix: str, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """The stamps below a folder; links are followed, but not back to a folder above."""
    try:
        here = os.stat(folder)
        entries = sorted(os.scandir(folder), key=lambda each: each.name)
    except OSError:
        return
    itself = (here.st_dev, here.st_ino)
    if itself in above:
        return
    for entry in entries:
        try:
            status, is_folder = entry.stat(), entry.is_dir()
        except OSError:
            continue
        if is_folder:
            yield f"{prefix}{entry.name}/", (0, -1)
            yield from _stamps(folder / entry.name, f"{prefix}{entry.name}/", above | {itself})
        else:
            yield f"{prefix}{entry.name}", (status.st_mtime_ns, status.st_size)
