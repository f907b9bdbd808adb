"""Folders of models, made of links to blobs; each has a manifest, which is its lock, too."""

import json
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from gateway.storage.mirror.blobs import KEY_BYTES, Blobs, sync
from gateway.storage.mirror.locks import CacheLock

BUILDING = ".building"
STALE_SECS = 3600
"""Folders are built, and deleted, in less time."""
ONE_MODEL = "_"
"""The folder of trees of a repository that is the folder of one model."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a tree: the blob of each file and the size of each blob; its folders."""

    address: str
    files: Mapping[str, str]
    sizes: Mapping[str, int]
    folders: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text of its file."""
        found = {name: getattr(self, name) for name in ("address", "files", "sizes", "folders")}
        return json.dumps(found, sort_keys=True)

    @classmethod
    def read(cls, path: Path) -> "Manifest | None":
        """The manifest in a file; None if it was deleted or is torn."""
        try:
            found = json.loads(path.read_bytes())
            return cls(**{**found, "folders": tuple(found["folders"])})
        except (FileNotFoundError, ValueError):
            return None


class RemoteTree:
    """The folder of a model, which is kept until its last `release`, or until it is collected."""

    def __init__(self, path: Path, lock: CacheLock) -> None:
        self.path = path
        self._free = weakref.finalize(self, lock.close)
        self._holders = 1

    def hold(self) -> None:
        """Keep the folder until one more `release`."""
        self._holders += 1

    def release(self) -> None:
        """Release the folder; after the last release it may be evicted."""
        self._holders -= 1
        if not self._holders:
            self._free()


class Trees:
    """The trees of a cache, by repository and model."""

    def __init__(self, root: Path) -> None:
        self._root = root / "trees"

    def is_whole(self, repository: str, model: str, manifest: Manifest) -> bool:
        """Whether the folder of a manifest is filled."""
        return self._path(repository, model, manifest).is_dir()

    def hold(self, repository: str, model: str, manifest: Manifest) -> RemoteTree:
        """The tree of a manifest, whole or not; it and its blobs are not evicted while held."""
        folder = self._path(repository, model, manifest)
        path = folder.with_suffix(".json")
        while True:
            try:
                lock = CacheLock.shared(path)
                break
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, manifest.to_json())
        with suppress(OSError):  # a cache that is only read
            os.utime(path)
        return RemoteTree(folder, lock)

    def build(self, tree: RemoteTree, manifest: Manifest, blobs: Blobs) -> None:
        """Fill the folder of a tree; FileNotFoundError if one of its blobs was deleted."""
        staging = tree.path.parent / BUILDING / secrets.token_hex(8)
        try:
            for folder in ("", *manifest.folders):
                (staging / folder).mkdir(parents=True, exist_ok=True)
            for name, key in manifest.files.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                _link(blobs.path(key), staging / name)
            for folder, _, _ in os.walk(staging, topdown=False):
                sync(Path(folder))
            _publish(staging, tree.path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def manifests(self) -> Iterator[tuple[Path, Manifest]]:
        """The file and the content of every manifest, the least recently used first."""
        found = []
        for each in self._root.glob("*/*/*.json"):
            with suppress(FileNotFoundError):
                found.append((each.stat().st_mtime, each))
        for _, path in sorted(found):
            if manifest := Manifest.read(path):
                yield path, manifest

    def delete_stale(self, now: float) -> None:
        """Delete the folders of processes that died while they built or deleted a tree.

        `now` is the time of the file system.
        """
        for each in self._root.glob(f"*/*/{BUILDING}/*"):
            with suppress(FileNotFoundError):
                if each.stat().st_mtime < now - STALE_SECS:
                    shutil.rmtree(each, ignore_errors=True)

    def _path(self, repository: str, model: str, manifest: Manifest) -> Path:
        digest = blake2b(manifest.to_json().encode(), digest_size=KEY_BYTES)
        return self._root / repository / (model or ONE_MODEL) / digest.hexdigest()


def delete_folder(manifest: CacheLock) -> None:
    """Delete the folder of the tree whose manifest is locked."""
    # Renamed first: a process that dies in between must not leave half a tree.
    doomed = manifest.path.parent / BUILDING / secrets.token_hex(8)
    doomed.parent.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        manifest.path.with_suffix("").rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _publish(staging: Path, path: Path) -> None:
    try:
        staging.rename(path)
    except OSError:
        if not path.is_dir():  # else another process was first
            raise
    sync(path.parent)


def _link(blob: Path, path: Path) -> None:
    try:
        os.link(blob, path)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without hard links
        path.symlink_to(blob.resolve(strict=True))


def _write(path: Path, text: str) -> None:
    staging = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    staging.write_text(text)
    staging.rename(path)
