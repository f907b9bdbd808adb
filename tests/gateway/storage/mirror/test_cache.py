"""The cache has a bound; what a process uses is never evicted, and each file can be verified."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.storage.mirror.blobs import Blobs
from gateway.storage.mirror.cache import DamagedFile, RemoteCache
from gateway.storage.mirror.downloads import DownloadProgress
from gateway.storage.mirror.errors import MirrorError
from gateway.storage.mirror.locks import CacheLock
from gateway.storage.mirror.mirror import Mirror
from gateway.storage.mirror.settings import CacheBound
from gateway.storage.mirror.trees import STALE_SECS, Manifest, RemoteTree, delete_folder
from gateway.storage.remote.objects import RemoteError, RemoteObject
from tests.gateway.storage.mirror.conftest import Open
from tests.remote_stores import MemoryStore

SOON_SECS = 30
DAMAGED = "s3://bucket/models/a/1/weights"


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    for name in ("a", "b", "c"):
        made.put(f"{name}/1/weights", name.encode() * 400)
    return made


def addresses(root: Path) -> list[str]:
    return [each.address.rpartition("/")[2] for each in RemoteCache(root).list()]


def use(mirror: Mirror, name: str) -> None:
    mirror.folder(name).fetch().release()


def test_the_least_recently_used_model_is_evicted(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    mirror = mirror_of(store, bound=CacheBound(900))
    for name in ("a", "b", "a", "c"):
        use(mirror, name)
    assert addresses(root) == ["a", "c"]
    assert len(Blobs(root).sizes()) == 2


def test_a_model_in_use_is_not_evicted(store: MemoryStore, mirror_of: Open, root: Path) -> None:
    mirror = mirror_of(store, bound=CacheBound(900))
    used = mirror.folder("a").fetch()
    use(mirror, "b")
    use(mirror, "c")
    assert addresses(root) == ["a", "c"]
    assert (used.path / "1/weights").read_bytes() == b"a" * 400


def test_two_servers_do_not_evict_each_other(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    first = mirror_of(store, bound=CacheBound(900))
    second = mirror_of(store, bound=CacheBound(900))
    used = [first.folder("a").fetch(), second.folder("b").fetch()]
    with pytest.raises(MirrorError, match=r"model 'c' needs .* GiB of it in use"):
        first.folder("c").fetch()
    assert addresses(root) == ["a", "b", "c"]
    assert all((each.path / "1/weights").is_file() for each in used)
    used[1].release()
    use(second, "c")
    assert addresses(root) == ["a", "c"]


def test_a_model_that_cannot_fit_evicts_no_other(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    mirror = mirror_of(store, bound=CacheBound(900))
    use(mirror, "a")
    store.put("d/1/weights", b"d" * 1000)
    mirror.refresh("d")
    with pytest.raises(MirrorError, match="model 'd' needs"):
        mirror.folder("d").fetch()
    assert "a" in addresses(root)


def test_a_download_that_was_cut_needs_room_for_its_model_once(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    def cut(each: RemoteObject, start: int) -> None:
        if start == 320:
            raise RemoteError("Interrupted", "cannot read 'a/1/weights': Interrupted")

    store.before_read = cut
    with pytest.raises(MirrorError, match="Interrupted"):
        mirror_of(store).folder("a").fetch()
    store.before_read = lambda each, start: None
    assert Blobs(root).partials()
    use(mirror_of(store, bound=CacheBound(450)), "a")
    assert addresses(root) == ["a"]


def test_of_loads_at_once_that_do_not_fit_together_the_first_has_room(
    store: MemoryStore, mirror_of: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, together = mirror_of(store, bound=CacheBound(500)), threading.Barrier(3)
    exclusive, turns, loaded = CacheLock.exclusive, list[int](), list[int]()

    def locked(path: Path) -> CacheLock:
        together.wait(SOON_SECS)
        lock = exclusive(path)
        turns.append(threading.get_ident())
        return lock

    monkeypatch.setattr(CacheLock, "exclusive", locked)

    def load(name: str) -> RemoteTree | MirrorError:
        try:
            tree = mirror.folder(name).fetch()
            loaded.append(threading.get_ident())
            return tree
        except MirrorError as error:
            return error

    with ThreadPoolExecutor() as threads:
        results = list(threads.map(load, ("a", "b", "c")))
    errors = [each for each in results if isinstance(each, MirrorError)]
    assert loaded == turns[:1]
    assert len(errors) == 2
    assert all("needs" in str(each) for each in errors)
    assert sum(Blobs(root).sizes().values()) == 400


def test_a_download_under_way_has_its_room_and_two_servers_share_it(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    begun, shared, held = threading.Event(), threading.Event(), threading.Event()

    def hold(each: RemoteObject, start: int) -> None:
        begun.set()
        assert held.wait(SOON_SECS)

    for part in range(80):  # more than are open at once
        store.put(f"d/1/{part}", b"%03d" % part)
    mirror = mirror_of(store, bound=CacheBound(600))
    second = mirror_of(store, bound=CacheBound(250))
    store.before_read = hold
    with ThreadPoolExecutor() as threads:
        try:
            first = threads.submit(use, mirror, "d")
            assert begun.wait(SOON_SECS)
            with pytest.raises(MirrorError, match="model 'a' needs"):
                use(mirror, "a")
            again = threads.submit(second.folder("d").fetch, report=lambda _: shared.set())
            assert shared.wait(SOON_SECS)
        finally:
            held.set()
        first.result(SOON_SECS)
        again.result(SOON_SECS).release()
    assert sum(Blobs(root).sizes().values()) == 240


def test_a_bound_of_0_keeps_what_is_in_use(store: MemoryStore, mirror_of: Open, root: Path) -> None:
    mirror = mirror_of(store, bound=CacheBound(0))
    used = mirror.folder("a").fetch()
    use(mirror, "b")
    use(mirror, "c")
    assert addresses(root) == ["a", "c"]
    used.release()
    use(mirror, "b")
    assert addresses(root) == ["b"]


def test_a_percentage_is_one_of_the_file_system(root: Path, tmp_path: Path) -> None:
    half = CacheBound(50, is_percentage=True).bytes_of(tmp_path)
    assert half == CacheBound(100, is_percentage=True).bytes_of(tmp_path) // 2


def test_what_no_model_refers_to_is_evicted_first(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    mirror = mirror_of(store, bound=CacheBound(900))
    use(mirror, "a")
    mirror.read("b/1/weights")
    use(mirror, "c")
    assert addresses(root) == ["a", "c"]
    assert len(Blobs(root).sizes()) == 2


def test_the_rest_of_a_process_that_died_is_deleted(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    use(mirror_of(store), "a")
    stale = next(root.glob("trees/*/a/.building")) / "0123"
    stale.mkdir()
    long_ago = time.time() - STALE_SECS - 60
    os.utime(stale, (long_ago, long_ago))
    RemoteCache(root).clean()
    assert not stale.exists()


def test_clean_deletes_all_that_is_not_in_use(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    mirror = mirror_of(store)
    used = mirror.folder("a").fetch()
    use(mirror, "b")
    assert [each.in_use for each in RemoteCache(root).list()] == [True, False]
    assert RemoteCache(root).clean() == 400
    assert addresses(root) == ["a"]
    assert used.path.is_dir()


def test_a_damaged_file_is_found_and_downloaded_again(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    mirror = mirror_of(store)
    for name in ("a", "b"):
        use(mirror, name)
    damaged = mirror.folder("a").fetch()
    file = damaged.path / "1/weights"
    file.chmod(0o644)
    file.write_bytes(b"x" * 400)
    damaged.release()
    assert list(RemoteCache(root).damaged()) == [DamagedFile(DAMAGED, in_use=False)]
    assert list(RemoteCache(root).damaged()) == []
    assert (mirror.folder("a").fetch().path / "1/weights").read_bytes() == b"a" * 400


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob, _: os.truncate(blob, 399),
        lambda blob, _: os.truncate(blob, 401),
        lambda _, checksums: os.truncate(checksums, 20),
        lambda _, checksums: os.truncate(checksums, 0),
        lambda _, checksums: checksums.unlink(),
    ],
    ids=["shorter", "longer", "checksums torn", "checksums empty", "checksums missing"],
)
def test_a_blob_that_does_not_have_its_checksums_is_damaged(
    store: MemoryStore, mirror_of: Open, root: Path, damage: Callable[[Path, Path], None]
) -> None:
    use(mirror_of(store), "a")
    (blob,) = (each for each in (root / "blobs").glob("*/*") if each.stat().st_size == 400)
    assert not Blobs(root).is_damaged(blob.name)
    blob.chmod(0o644)
    damage(blob, root / "checksums" / blob.name)
    assert Blobs(root).is_damaged(blob.name)


def test_a_damaged_file_of_a_model_in_use_is_reported_until_it_is_free(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    mirror = mirror_of(store)
    used = mirror.folder("a").fetch()
    file = used.path / "1/weights"
    file.chmod(0o644)
    file.write_bytes(b"x" * 400)
    for _ in range(2):
        assert list(RemoteCache(root).damaged()) == [DamagedFile(DAMAGED, in_use=True)]
    assert file.exists()
    used.release()
    assert list(RemoteCache(root).damaged()) == [DamagedFile(DAMAGED, in_use=False)]
    assert (mirror.folder("a").fetch().path / "1/weights").read_bytes() == b"a" * 400


def test_a_failed_eviction_delays_no_other(
    store: MemoryStore, mirror_of: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, cache = mirror_of(store), RemoteCache(root)
    use(mirror, "a")

    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(cache.blobs, "partials", fail)
        with pytest.raises(MirrorError, match="the cache cannot be used"):
            cache.make_room({"key": 1}, "a model")
    assert len(os.listdir("/proc/self/fd")) == before
    assert CacheLock.is_free(root / "eviction.lock")


def test_an_eviction_holds_the_lock_of_one_model_at_once(
    store: MemoryStore, mirror_of: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        use(mirror_of(store), name)
    held: list[int] = []
    before = len(os.listdir("/proc/self/fd"))

    def delete(manifest: CacheLock) -> None:
        held.append(len(os.listdir("/proc/self/fd")) - before)
        delete_folder(manifest)

    monkeypatch.setattr("gateway.storage.mirror.cache.delete_folder", delete)
    assert RemoteCache(root).clean() == 1200
    assert held == [2, 2, 2]  # that of the eviction, too


def test_a_model_that_is_used_since_the_scan_is_not_evicted(
    store: MemoryStore, mirror_of: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirror_of(store)
    for name in ("a", "b"):
        use(mirror, name)
    used: list[RemoteTree] = []

    def delete(manifest: CacheLock) -> None:
        if not used:
            used.append(mirror.folder("b").fetch())
        delete_folder(manifest)

    monkeypatch.setattr("gateway.storage.mirror.cache.delete_folder", delete)
    RemoteCache(root).clean()
    assert addresses(root) == ["b"]


def test_files_that_disappear_during_a_scan_are_none(
    store: MemoryStore, mirror_of: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(mirror_of(store), "a")
    for pattern, name in (("trees/*/a", "gone.json"), ("blobs/*", "gone")):
        (next(root.glob(pattern)) / name).symlink_to(root / "none")
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert addresses(root) == ["a"]
    assert list(Blobs(root).sizes().values()) == [400]


def test_a_model_that_is_evicted_while_models_are_listed_is_none(
    store: MemoryStore, mirror_of: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, cache = mirror_of(store), RemoteCache(root)
    for name in ("a", "b"):
        use(mirror, name)
    manifests = cache.trees.manifests

    def evicted() -> Iterator[tuple[Path, Manifest]]:
        for path, manifest in manifests():
            if manifest.address.endswith("/a"):
                path.unlink()
            yield path, manifest

    monkeypatch.setattr(cache.trees, "manifests", evicted)
    assert [each.address.rpartition("/")[2] for each in cache.list()] == ["b"]


def test_an_eviction_during_a_load_is_repaired(
    store: MemoryStore, mirror_of: Open, root: Path
) -> None:
    mirror, blobs, evicted = mirror_of(store), Blobs(root), list[str]()

    def evict(progress: DownloadProgress) -> None:
        if not evicted and progress.done == progress.total:
            evicted.extend(blobs.sizes())
            for key in evicted:
                blobs.delete(key)

    tree = mirror.folder("a").fetch(report=evict)
    assert evicted
    assert (tree.path / "1/weights").read_bytes() == b"a" * 400
    assert len(store.reads) == 2 * 7
