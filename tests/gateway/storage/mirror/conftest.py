"""A mirror of a bucket in memory, with parts of 64 bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.storage.mirror import blobs, downloads
from gateway.storage.mirror.cache import RemoteCache
from gateway.storage.mirror.downloads import Transfers
from gateway.storage.mirror.mirror import Mirror
from gateway.storage.mirror.settings import CacheBound
from tests.remote_stores import MemoryStore

PART_BYTES = 64
UNBOUNDED = CacheBound(100, is_percentage=True)

Open = Callable[..., Mirror]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blobs, downloads):
        monkeypatch.setattr(module, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(downloads, "SMALL_BYTES", PART_BYTES // 2)
    monkeypatch.setattr(downloads, "TURN_SECS", 0.01)


@pytest.fixture
def store() -> MemoryStore:
    """A bucket with a model of two versions and one of one version."""
    made = MemoryStore()
    made.put("m/config.pbtxt", b"config of m")
    made.put("m/labels.txt", b"labels")
    made.put("m/1/weights", b"1" * 1000)
    made.put("m/2/weights", b"2" * 1000)
    made.put("n/config.pbtxt", b"config of n")
    made.put("n/1/weights", b"n" * 10)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def mirror_of(root: Path) -> Open:
    """Open a mirror, as a server does at its start."""

    def opened(
        store: MemoryStore,
        *,
        bound: CacheBound = UNBOUNDED,
        transfers: Transfers | None = None,
        offline: bool = False,
        folder: Path | None = None,
    ) -> Mirror:
        cache = RemoteCache(folder or root, bound)
        found = Mirror(store, cache, transfers or Transfers(pause_secs=0), offline=offline)
        found.open()
        return found

    return opened
