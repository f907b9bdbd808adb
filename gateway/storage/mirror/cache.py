"""The cache of remote repositories: its bound, the eviction of what no server uses, its checks."""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.storage.mirror.blobs import GIB, Blobs
from gateway.storage.mirror.errors import ELSEWHERE, MirrorError, disk_error
from gateway.storage.mirror.locks import CacheLock
from gateway.storage.mirror.settings import DEFAULT_BOUND, CacheBound
from gateway.storage.mirror.trees import Manifest, RemoteTree, Trees, delete_folder

log = logging.getLogger("sluice.remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTree:
    """A tree of the cache: files of a model, their size, and the time of its last use."""

    address: str
    size: int
    used_at: float
    in_use: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file with another content than the downloaded one; kept while a server uses its model."""

    address: str
    in_use: bool


class RemoteCache:
    """The blobs and trees below a folder, shared by processes; files in use are never evicted."""

    def __init__(self, root: Path, bound: CacheBound = DEFAULT_BOUND) -> None:
        self.root = root.absolute()
        self.blobs = Blobs(self.root)
        self.trees = Trees(self.root)
        self._bound = bound
        self.byte_size = 0
        """The size of whole files when it was last measured."""

    def hold_whole(self, repository: str, model: str, manifest: Manifest) -> RemoteTree | None:
        """As `Trees.hold`, None if the tree is not whole; MirrorError if it cannot be held."""
        try:
            if self.trees.is_whole(repository, model, manifest):
                tree = self.trees.hold(repository, model, manifest)
                if tree.path.is_dir():
                    return tree
                tree.release()
        except OSError as error:
            raise disk_error(error) from None
        return None

    def hold_new(self, repository: str, model: str, manifest: Manifest, what: str) -> RemoteTree:
        """As `Trees.hold`, with room for the blobs that the tree lacks; raises as `make_room`."""
        with self._evicting() as lock:
            # Held within the lock: of two loads that do not fit together, the first one has room.
            tree = self.trees.hold(repository, model, manifest)
            try:
                self._evict(lock, manifest.sizes, what)
            except BaseException:
                tree.release()
                raise
            return tree

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

    def make_room(self, wanted: Mapping[str, int], what: str) -> None:
        """Evict the least recently used files until blobs of these sizes fit; else MirrorError.

        The blobs of other loads fit, too. With a bound of 0 all that is not in use is evicted.
        """
        with self._evicting() as lock:
            self._evict(lock, wanted, what)

    def clean(self) -> int:
        """Evict everything that is not in use; returns its size."""
        if not self.root.exists():
            return 0
        with self._evicting() as lock:
            eviction = _Eviction(self, lock, {})
            before = eviction.size
            eviction.evict(before)
            return before - eviction.size

    def list(self) -> list[CachedTree]:
        """All trees, the least recently used first."""
        found = []
        for path, manifest in self.trees.manifests():
            with suppress(FileNotFoundError):  # evicted since
                found.append(_shown(path, manifest))
        return found

    def damaged(self) -> Iterator[DamagedFile]:
        """The files with another content than the downloaded one.

        Their blobs are deleted, and the trees with them, unless a server uses one of the trees.
        """
        for key in sorted(self.blobs.sizes()):
            if self.blobs.is_damaged(key):
                yield from self._delete_damaged(key)

    def _delete_damaged(self, key: str) -> tuple[DamagedFile, ...]:
        with self._evicting(), ExitStack() as locks:
            users = [each for each in self.trees.manifests() if key in each[1].files.values()]
            free: list[CacheLock] = []
            for path, _ in users:
                if (lock := CacheLock.attempt(path)) is not None:
                    free.append(locks.enter_context(closing(lock)))
            in_use = len(free) < len(users)
            if not in_use:
                # Locked to the end: a load must not build a tree from the blob meanwhile.
                for each in free:
                    delete_folder(each)
                self.blobs.delete(key)
                for each in free:
                    each.delete()
        return tuple(
            DamagedFile(f"{manifest.address}/{name}", in_use)
            for _, manifest in users
            for name, blob in manifest.files.items()
            if blob == key
        )

    @contextmanager
    def _evicting(self) -> Iterator[CacheLock]:
        """The lock of evictions; MirrorError if the cache cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with closing(CacheLock.exclusive(self.root / "eviction.lock")) as lock:
                yield lock
        except OSError as error:
            raise disk_error(error) from None

    def _evict(self, lock: CacheLock, wanted: Mapping[str, int], what: str) -> None:
        eviction = _Eviction(self, lock, wanted)
        if not eviction.needed:
            return
        bound = self._bound.bytes_of(self.root)
        free = shutil.disk_usage(self.root).free
        excess = eviction.promised - min(free, bound - eviction.size)
        if bound and excess > eviction.evictable:
            if free < bound - eviction.size:
                raise _too_full(what, free, eviction)
            raise _too_small(what, bound, eviction)
        eviction.evict(excess)


class _Eviction:
    """One eviction, under its lock: what there is, and what no process uses or wants.

    `promised` are the bytes that blobs of loads lack, `needed` those of the `wanted` ones.
    """

    def __init__(self, cache: RemoteCache, lock: CacheLock, wanted: Mapping[str, int]) -> None:
        self._cache = cache
        os.utime(lock.path)
        cache.trees.delete_stale(lock.path.stat().st_mtime)
        # Blobs first: a download adds its manifest before its blobs.
        self._sizes = cache.blobs.sizes()
        self._partials = cache.blobs.partials()
        self.size = sum(self._sizes.values()) + sum(self._partials.values())
        self._uses = Counter(wanted.keys())
        self._free: list[tuple[Path, Manifest]] = []
        held = dict(wanted)
        for path, manifest in cache.trees.manifests():
            self._uses.update(set(manifest.files.values()))
            if CacheLock.is_free(path):
                self._free.append((path, manifest))
            else:
                held.update(manifest.sizes)
        self.in_use = sum(map(self._known, held))
        self.needed = self._lacking(wanted)
        self.promised = self._lacking(held)

    @property
    def evictable(self) -> int:
        """Bytes of all that is not in use."""
        return self.size - self.in_use

    def evict(self, excess: int) -> None:
        """Evict at least as many bytes, or all that is not in use."""
        until = self.size - excess
        for key in sorted(self._unused(), key=self._cache.blobs.whole_since):
            if self.size <= until:
                return
            self._drop(key)
        for path, manifest in self._free:
            if self.size <= until:
                return
            if (lock := CacheLock.attempt(path)) is None:  # in use since the scan
                continue
            with closing(lock):
                delete_folder(lock)
                lock.delete()
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

    def _known(self, key: str) -> int:
        return self._sizes.get(key, 0) + self._partials.get(key, 0)

    def _lacking(self, sizes: Mapping[str, int]) -> int:
        return sum(max(0, size - self._known(key)) for key, size in sizes.items())


def _shown(path: Path, manifest: Manifest) -> CachedTree:
    return CachedTree(
        address=manifest.address,
        size=sum(manifest.sizes.values()),
        used_at=os.stat(path).st_mtime,
        in_use=not CacheLock.is_free(path),
        whole=path.with_suffix("").is_dir(),
    )


def _too_full(what: str, free: int, eviction: _Eviction) -> MirrorError:
    others = eviction.promised - eviction.needed
    left = max(0, free + eviction.evictable - others)
    return MirrorError(
        f"{what} needs {eviction.needed / GIB:.1f} GiB more, the disk of the cache has "
        f"{left / GIB:.1f} GiB left: make some, {ELSEWHERE}"
    )


def _too_small(what: str, bound: int, eviction: _Eviction) -> MirrorError:
    others = eviction.in_use + eviction.promised - eviction.needed
    return MirrorError(
        f"{what} needs {eviction.needed / GIB:.1f} GiB more, the cache may have "
        f"{bound / GIB:.1f} GiB (--remote-cache-size), {others / GIB:.1f} GiB of it in use"
    )
