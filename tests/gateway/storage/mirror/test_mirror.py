"""A mirror shows one remote repository as local folders, also while its storage fails."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.storage.mirror.errors import DownloadStopped, MirrorError
from gateway.storage.remote.objects import RemoteError, RemoteObject
from tests.builders import WAIT_SECS
from tests.gateway.storage.mirror.conftest import Open
from tests.remote_stores import NOW, NS, MemoryStore, slow_down


def files_of(folder: Path) -> dict[str, bytes]:
    found = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in found}


VERSION_2 = {
    "config.pbtxt": b"config of m",
    "labels.txt": b"labels",
    "2/weights": b"2" * 1000,
}


def test_a_version_is_downloaded_with_what_is_in_no_version(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    assert store.reads == []
    tree = mirror.folder("m").fetch(without=["1"])
    assert files_of(tree.path) == VERSION_2
    assert "m/1/weights" not in store.reads
    assert len(store.reads) == 16 + 2
    assert len(store.lists) == 1


def test_a_second_start_downloads_nothing(store: MemoryStore, mirror_of: Open) -> None:
    mirror_of(store).folder("m").fetch(without=["1"])
    store.reads.clear()
    store.lists.clear()
    again = mirror_of(store)
    assert files_of(again.folder("m").fetch(without=["1"]).path) == VERSION_2
    assert again.read("m/config.pbtxt") == b"config of m"
    assert (store.reads, store.lists) == ([], [""])


def test_another_version_costs_its_own_bytes(store: MemoryStore, mirror_of: Open) -> None:
    mirror = mirror_of(store)
    first = mirror.folder("m").fetch(without=["1"])
    store.reads.clear()
    second = mirror.folder("m").fetch(without=["2"])
    assert set(store.reads) == {"m/1/weights"}
    assert (first.path / "labels.txt").samefile(second.path / "labels.txt")
    assert mirror.cache_hits == 2


def test_files_have_the_time_of_their_object_and_are_read_only(
    store: MemoryStore, mirror_of: Open
) -> None:
    found = (mirror_of(store).folder("m").fetch().path / "2/weights").stat()
    assert found.st_mtime_ns == (int(NOW.timestamp()) - 3600) * NS
    assert stat.S_IMODE(found.st_mode) == 0o444


def test_a_disk_without_hard_links_has_symbolic_links(
    store: MemoryStore, mirror_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    tree = mirror_of(store).folder("m").fetch(without=["1"])
    assert (tree.path / "2/weights").is_symlink()
    assert files_of(tree.path) == VERSION_2


def test_an_empty_file_and_an_empty_version_are_there(store: MemoryStore, mirror_of: Open) -> None:
    store.put("e/config.pbtxt", b"ensemble")
    store.put("e/empty")
    store.put_folder("e/1")
    tree = mirror_of(store).folder("e").fetch()
    assert files_of(tree.path) == {"config.pbtxt": b"ensemble", "empty": b""}
    assert (tree.path / "1").is_dir()


def test_an_object_that_changes_meanwhile_is_downloaded_anew(
    store: MemoryStore, mirror_of: Open
) -> None:
    def change(each: RemoteObject, start: int) -> None:
        if each.key == "m/2/weights" and start == 640:
            store.before_read = lambda each, start: None
            store.put("m/2/weights", b"3" * 900)

    mirror, store.before_read = mirror_of(store), change
    tree = mirror.folder("m").fetch(without=["1"])
    assert files_of(tree.path) == {**VERSION_2, "2/weights": b"3" * 900}
    assert store.lists == ["", "m"]


def test_an_object_that_changes_each_time_is_named(store: MemoryStore, mirror_of: Open) -> None:
    contents = iter(range(100))

    def change(each: RemoteObject, start: int) -> None:
        if each.key == "n/1/weights":
            store.put("n/1/weights", b"%d" % next(contents))

    mirror, store.before_read = mirror_of(store), change
    with pytest.raises(MirrorError, match="'n/1/weights': it has changed"):
        mirror.folder("n").fetch()
    assert store.reads.count("n/1/weights") == 4
    assert files_of(mirror.folder("m").fetch(without=["1"]).path) == VERSION_2


def test_new_weights_never_get_the_configuration_of_the_old(
    store: MemoryStore, mirror_of: Open
) -> None:
    def change(each: RemoteObject, start: int) -> None:
        store.put("n/config.pbtxt", b"another config")
        store.put("n/1/weights", b"x")

    mirror, store.before_read = mirror_of(store), change
    with pytest.raises(MirrorError, match="model 'n' changed during its download"):
        mirror.folder("n").fetch()


def upload(store: MemoryStore) -> None:
    store.put("n/.uploading")
    store.put("n/1/weights", b"half")


def write(store: MemoryStore) -> None:
    store.put("n/1/weights", b"half", age_secs=0)


def remove(store: MemoryStore) -> None:
    store.delete("n")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (upload, "model 'n' is being uploaded"),
        (write, "model 'n' changed during its download: load it again"),
        (remove, "model 'n' was deleted during its download"),
    ],
)
def test_a_model_that_is_written_during_its_download_is_not_loaded(
    store: MemoryStore, mirror_of: Open, change: Callable[[MemoryStore], None], error: str
) -> None:
    mirror, store.before_read = mirror_of(store), lambda each, start: change(store)
    with pytest.raises(MirrorError, match=error):
        mirror.folder("n").fetch()


def test_a_folder_is_that_of_the_listing_in_which_it_was_found(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    folder = mirror.folder("n")
    tree = folder.fetch()
    store.put("n/1/weights", b"new")
    mirror.poll()
    mirror.poll()
    assert mirror.folder("n").fetch().path != tree.path
    assert folder.fetch().path == tree.path


def test_a_download_continues_after_the_storage_was_down(
    store: MemoryStore, mirror_of: Open
) -> None:
    def fail(each: RemoteObject, start: int) -> None:
        if start == 640:
            raise RemoteError("Interrupted", "cannot read 'm/2/weights': Interrupted")

    mirror, store.before_read = mirror_of(store), fail
    with pytest.raises(MirrorError, match="cannot read 'm/2/weights': Interrupted"):
        mirror.folder("m").fetch(without=["1"])
    done = store.reads.count("m/2/weights") - 1
    store.reads.clear()
    store.before_read = lambda each, start: None
    assert files_of(mirror.folder("m").fetch(without=["1"]).path) == VERSION_2
    assert 1 <= store.reads.count("m/2/weights") <= 16 - min(done, 1)


def test_the_end_of_a_load_ends_its_download(store: MemoryStore, mirror_of: Open) -> None:
    stopped = threading.Event()
    mirror, store.before_read = mirror_of(store), lambda each, start: stopped.set()
    with pytest.raises(DownloadStopped):
        mirror.folder("m").fetch(stopped=stopped)
    assert mirror.progress("m") is None


def test_progress_is_reported_and_shown(store: MemoryStore, mirror_of: Open) -> None:
    mirror, seen = mirror_of(store), set[tuple[int, int]]()

    def report(progress: object) -> None:
        assert mirror.progress("n") is progress
        seen.add((mirror.progress("n").done, mirror.progress("n").total))  # type: ignore[union-attr]

    mirror.folder("n").fetch(report=report)
    assert max(seen) == (21, 21)


def test_a_full_disk_fails_one_model_and_leaves_its_space(
    store: MemoryStore, mirror_of: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirror_of(store)
    write = os.pwrite

    def full(descriptor: int, content: bytes, at: int) -> int:
        if at == 640:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MirrorError, match="no space is left on the disk of the cache") as error:
        mirror.folder("m").fetch(without=["1"])
    assert str(root) not in str(error.value)
    assert list((root / "partial").iterdir()) == []
    assert mirror.folder("n").fetch().path.is_dir()


@pytest.mark.parametrize("is_cut", [False, True], ids=["alone", "after a cut"])
def test_parts_that_a_disk_has_lost_are_downloaded_again(
    store: MemoryStore,
    mirror_of: Open,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cut: bool,
) -> None:
    """A failed sync is reported once: a later one succeeds without those parts."""
    store.put("e/config.pbtxt", b"config of e")
    store.put("e/1/weights", b"A" * 64 + b"B" * 64)
    mirror, asked, failed = mirror_of(store), threading.Event(), threading.Event()
    sync = os.fdatasync

    def lose_once(descriptor: int) -> None:
        if failed.is_set():
            sync(descriptor)
            return
        assert asked.wait(WAIT_SECS)
        os.pwrite(descriptor, bytes(64), 0)  # what the disk has in place of the part
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def before_second(each: RemoteObject, start: int) -> None:
        if each.key == "e/1/weights" and start == 64 and not failed.is_set():
            asked.set()
            if is_cut:
                raise RemoteError("Interrupted", "cut")
            assert failed.wait(WAIT_SECS)

    store.before_read = before_second
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lose_once)
        with pytest.raises(MirrorError):
            mirror.folder("e").fetch()
    assert failed.is_set()
    assert 128 not in [each.stat().st_size for each in root.glob("partial/*/data")]
    tree = mirror.folder("e").fetch()
    assert (tree.path / "1/weights").read_bytes() == b"A" * 64 + b"B" * 64


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    store: MemoryStore, mirror_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror_of(store).folder("n").fetch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for owner, name in ((Path, "write_text"), (Path, "mkdir"), (os, "utime")):
        monkeypatch.setattr(owner, name, refuse)
    mirror = mirror_of(store)
    assert mirror.folder("n").fetch().path.is_dir()
    with pytest.raises(MirrorError, match="no permission to write into the cache"):
        mirror.folder("m").fetch()


def test_a_storage_that_is_overloaded_gets_fewer_requests(
    store: MemoryStore, mirror_of: Open
) -> None:
    refusals = iter(range(20))

    def overloaded(each: RemoteObject, start: int) -> None:
        if next(refusals, None) is not None:
            slow_down(each, start)

    mirror, store.before_read = mirror_of(store), overloaded
    assert files_of(mirror.folder("m").fetch(without=["1"]).path) == VERSION_2
