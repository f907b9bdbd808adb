"""The cache of remote repositories: its bound, the eviction of what no server uses, its checks."""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gateway.storage.mirror.blobs import Blobs
from gateway.storage.mirror.errors import MirrorError, disk_error
from gateway.storage.mirror.locks import CacheLock
from gateway.storage.mirror.settings import DEFAULT_BOUND, CacheBound
from gateway.storage.mirror.trees import Manifest, RemoteTree, Trees, delete_tree

log = logging.getLogger("sluice.remote")

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTree:
    """A tree of the cache: files of a model, their size, and the time of its last use."""

    address: str
    size: int
    used_at: float
    in_use: bool
    whole: bool


class RemoteCache:
    """The blobs and trees below a folder, shared by processes; files in use are never evicted."""

    def __init__(self, root: Path, bound: CacheBound = DEFAULT_BOUND) -> None:
        self.root = root.absolute()
        self.blobs = Blobs(self.root)
        self.trees = Trees(self.root)
        self._bound = bound
        self.byte_size = 0
        """The size of whole files when it was last measured."""

    def hold(self, repository: str, model: str, manifest: Manifest) -> RemoteTree:
        """As `Trees.hold`; MirrorError if the cache cannot be written."""
        try:
            return self.trees.hold(repository, model, manifest)
        except OSError as error:
            raise disk_error(error) from None

    def build(self, tree: RemoteTree, manifest: Manifest) -> None:
        """As `Trees.build`; MirrorError if the cache cannot be written."""
        try:
            self.trees.build(tree, manifest, self.blobs)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise disk_error(error) from None

    def measure(self) -> None:
        """Measure the size of whole files."""
        self.byte_size = sum(self.blobs.sizes().values())

    def make_room(self, needed: int, what: str) -> None:
        """Evict the least recently used files until as many bytes fit; MirrorError if they cannot.

        With a bound of 0 everything that is not in use is evicted.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _Eviction(self) as eviction:
                bound = self._bound.bytes_of(self.root)
                free = shutil.disk_usage(self.root).free
                excess = max(eviction.size + needed - bound, needed - free)
                if bound and excess > eviction.evictable:
                    raise _too_small(what, needed, bound, eviction)
                eviction.evict(excess)
        except OSError as error:
            raise disk_error(error) from None

    def clean(self) -> int:
        """Evict everything that is not in use; returns its size."""
        if not self.root.exists():
            return 0
        with _Eviction(self) as eviction:
            before = eviction.size
            eviction.evict(before)
            return before - eviction.size

    def list(self) -> list[CachedTree]:
        """All trees, the least recently used first."""
        return [_shown(path, manifest) for path, manifest in self.trees.manifests()]

    def damaged(self) -> Iterator[str]:
        """The address of each file with another content than the downloaded one.

        Its blob is deleted, and the trees with it that no server uses.
        """
        manifests = list(self.trees.manifests())
        for key in sorted(self.blobs.sizes()):
            if not self.blobs.is_damaged(key):
                continue
            self.blobs.delete(key)
            for path, manifest in manifests:
                names = [name for name, blob in manifest.files.items() if blob == key]
                yield from (f"{manifest.address}/{name}" for name in names)
                lock = CacheLock.attempt(path) if names else None
                if lock is not None:
                    delete_tree(lock)


class _Eviction:
    """One eviction: what there is, and locks on all that no process uses."""

    def __init__(self, cache: RemoteCache) -> None:
        self._cache = cache
        self._stack = ExitStack()

    def __enter__(self) -> "_Eviction":
        lock = CacheLock.exclusive(self._cache.root / "eviction.lock")
        self._stack.callback(lock.close)
        os.utime(lock.path)
        self._cache.trees.delete_stale(lock.path.stat().st_mtime)
        # Blobs first: a download adds its manifest before its blobs.
        self._sizes = self._cache.blobs.sizes()
        self._partials = self._cache.blobs.partials()
        self.size = sum(self._sizes.values()) + sum(self._partials.values())
        self._uses: Counter[str] = Counter()
        self._free: list[tuple[CacheLock, Manifest]] = []
        in_use: set[str] = set()
        for path, manifest in self._cache.trees.manifests():
            self._uses.update(set(manifest.files.values()))
            lock_of_tree = CacheLock.attempt(path)
            if lock_of_tree is None:
                in_use.update(manifest.files.values())
            else:
                self._stack.callback(lock_of_tree.close)
                self._free.append((lock_of_tree, manifest))
        self.in_use = sum(self._known(in_use))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def evictable(self) -> int:
        """Bytes of all that is not in use."""
        return self.size - self.in_use

    def evict(self, excess: int) -> None:
        """Evict at least as many bytes, or all that is not in use."""
        until = self.size - excess
        for key in sorted(self._unused(), key=self._cache.blobs.used_at):
            if self.size <= until:
                return
            self._drop(key)
        for lock, manifest in self._free:
            if self.size <= until:
                return
            delete_tree(lock)
            log.info("cached model evicted", extra={"address": manifest.address})
            for key in set(manifest.files.values()):
                self._uses[key] -= 1
                if not self._uses[key]:
                    self._drop(key)

    def _unused(self) -> set[str]:
        return {key for key in (*self._sizes, *self._partials) if not self._uses[key]}

    def _drop(self, key: str) -> None:
        if key in self._sizes:
            self._cache.blobs.delete(key)
            self.size -= self._sizes.pop(key)
        if key in self._partials and self._cache.blobs.delete_partial(key):
            self.size -= self._partials.pop(key)

    def _known(self, keys: Iterable[str]) -> Iterator[int]:
        return (self._sizes.get(key, 0) + self._partials.get(key, 0) for key in keys)


def _shown(path: Path, manifest: Manifest) -> CachedTree:
    lock = CacheLock.attempt(path)
    if lock is not None:
        lock.close()
    return CachedTree(
        address=manifest.address,
        size=sum(manifest.sizes.values()),
        used_at=os.stat(path).st_mtime,
        in_use=lock is None,
        whole=path.with_suffix("").is_dir(),
    )


def _too_small(what: str, needed: int, bound: int, eviction: _Eviction) -> MirrorError:
    return MirrorError(
        f"{what} needs {needed / GIB:.1f} GiB more, the cache may have {bound / GIB:.1f} GiB "
        f"(--remote-cache-size), {eviction.in_use / GIB:.1f} GiB of it in use"
    )
