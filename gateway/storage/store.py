"""The store of models on this machine; a model appears in it at once with all its files."""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

MANIFEST = ".complete.json"
BUILDING = ".building"
KEPT = ".kept"
"""The folder of files that backends keep; no model has such a name."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

Build = Callable[[Path], None]


class StoreError(Exception):
    """A model cannot be stored or read; the text names the cause and the fix."""


def default_root(environment: Mapping[str, str]) -> Path:
    """The folder of models: in `SLUICE_CACHE`, or else in the user's cache."""
    if cache := environment.get("SLUICE_CACHE"):
        return Path(cache) / "models"
    # A relative XDG_CACHE_HOME is ignored: XDG Base Directory Specification, "Basics".
    if (caches := environment.get("XDG_CACHE_HOME")) and Path(caches).is_absolute():
        return Path(caches) / "sluice" / "models"
    if home := environment.get("HOME"):
        return Path(home) / ".cache" / "sluice" / "models"
    raise StoreError("no place for models: set SLUICE_CACHE to a folder (HOME is not set either)")


def state_root(environment: Mapping[str, str]) -> Path | None:
    """The default folder of a server's state: the user's; None if the user has no place for it."""
    if (states := environment.get("XDG_STATE_HOME")) and Path(states).is_absolute():
        return Path(states) / "sluice"
    home = environment.get("HOME")
    return Path(home) / ".local" / "state" / "sluice" if home else None


class ModelStore:
    """A folder of models that any number of processes read and fill concurrently.

    A model is stored with all its files or not at all: it is built in another folder under a lock,
    synced to disk, and renamed. A manifest of sizes detects models that were truncated or deleted
    in part.
    """

    def __init__(self, root: Path, lock_timeout_s: float = 600) -> None:
        self._root = root.absolute()
        self._building = self._root / BUILDING
        self._lock_timeout_s = lock_timeout_s

    def path(self, name: str) -> Path:
        """The folder of model `name`, stored or not."""
        if not _is_plain(name):
            raise StoreError(f"'{name}' cannot be the name of a stored model: it names a path")
        return self._root / name

    def has(self, name: str) -> bool:
        """Whether model `name` is stored, with every file at its full size."""
        with self._explained():
            return _is_plain(name) and _is_complete(self._root / name)

    def publish(self, name: str, build: Build, on_wait: Callable[[], None]) -> Path:
        """Store model `name` if it is missing, and return its folder.

        `build` fills a folder. It is called only for a missing model, by one process at a time;
        if it raises, nothing is stored. `on_wait` is called once if another process is building
        the model; StoreError if that takes longer than the time limit of the lock.
        """
        path = self.path(name)
        with self._explained():
            self._building.mkdir(parents=True, exist_ok=True)
            with self._locked(name, on_wait):
                if not _is_complete(path):
                    self._fill(path, build)
        return path

    @contextmanager
    def _locked(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        # The import takes 10 ms, and servers of stored models do without it.
        filelock = import_module("filelock")
        lock = filelock.FileLock(self._building / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            on_wait()
            self._wait_for(lock, filelock.Timeout, name)
        try:
            yield
        finally:
            lock.release()

    def _wait_for(self, lock: Any, timeout: type[Exception], name: str) -> None:
        try:
            lock.acquire(timeout=self._lock_timeout_s)
        except timeout:
            raise StoreError(
                f"another process has been unpacking model '{name}' for more than "
                f"{self._lock_timeout_s:g} seconds: stop it if it hangs, then try again "
                f"(it holds {lock.lock_file})"
            ) from None

    def _fill(self, path: Path, build: Build) -> None:
        # Under the lock, so files here are of a process that died.
        unfinished = self._building / path.name
        _remove(unfinished)
        # A new name each time: a child of a dead process may still write into the old folder.
        staging = unfinished / secrets.token_hex(4)
        staging.mkdir(parents=True)
        try:
            build(staging)
            _seal(staging)
            _replace(path, staging, displaced=unfinished / "displaced")
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(_explain(error, self._building)) from error


def _is_plain(name: str) -> bool:
    return name != "" and Path(name).name == name and not name.startswith(".")


def _is_complete(folder: Path) -> bool:
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_bytes())
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _seal(folder: Path) -> None:
    """Write the manifest, set the modes by the umask, and sync all files to disk."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(sizes, indent=2))
    # Libraries write weights for the owner only, but a cache filled by root serves other users.
    mode = folder.stat().st_mode & 0o666
    for file in (*files, manifest):
        file.chmod(mode)
        _sync(file)
    for inner in (*(inner for inner in folder.rglob("*") if inner.is_dir()), folder):
        _sync(inner)


def _replace(path: Path, staging: Path, displaced: Path) -> None:
    if path.exists():  # incomplete, or we would not be here
        path.rename(displaced)
    staging.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, building: Path) -> str:
    elsewhere = "or set SLUICE_CACHE to another folder"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"'{_file_in(building)}' is a file, not a folder for models: move it {elsewhere}"
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return f"no permission to write '{error.filename}': grant it {elsewhere}"
    if error.errno in NO_SPACE:
        return f"no space is left on the disk of '{building.parent}': make some {elsewhere}"
    return f"the models in '{building.parent}' cannot be used: {error}"


def _file_in(path: Path) -> Path:
    """The part of `path` that is a file instead of a folder."""

    return next((part for part in (path, *path.parents) if part.is_file()), path)
