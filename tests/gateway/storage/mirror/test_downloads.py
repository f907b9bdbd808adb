"""Downloads have a bound, are repeated while a storage is overloaded, and continue after a kill."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gateway.storage.mirror import downloads
from gateway.storage.mirror.blobs import Blob, Blobs
from gateway.storage.mirror.downloads import Download, DownloadProgress, Transfers, rarely
from gateway.storage.remote.objects import RemoteError, RemoteObject
from tests.gateway.storage.mirror.conftest import Open
from tests.remote_stores import MemoryStore, slow_down

SOON_SECS = 30


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_the_bound_of_downloads_is_halved_and_grows_again() -> None:
    now = [0.0]
    transfers = Transfers(clock=lambda: now[0], pause_secs=0)
    refusals = iter([True, True, True])

    def read() -> bytes:
        if next(refusals, False):
            slow_down(RemoteObject("k", "e", 1, 0), 0)
        return b""

    transfers.copy(read, 1, threading.Event())
    assert transfers.bound == 32 // 8
    now[0] += 30
    assert transfers.bound == 32 // 8 + 2
    now[0] += 3600
    assert transfers.bound == 32


def test_refusals_of_requests_that_were_in_flight_together_halve_the_bound_once() -> None:
    transfers, together = Transfers(pause_secs=0), threading.Barrier(8)
    bounds: list[int] = []

    def copy() -> None:
        refusals = iter([True])

        def read() -> bytes:
            if next(refusals, False):
                together.wait(SOON_SECS)
                slow_down(RemoteObject("k", "e", 1, 0), 0)
            bounds.append(transfers.bound)
            return b""

        transfers.copy(read, 1, threading.Event())

    threads = [threading.Thread(target=copy) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert bounds == [16] * 8


def test_the_time_of_an_overload_begins_at_the_first_refusal_of_a_part() -> None:
    now, refusals = [0.0], iter([True])

    def read() -> bytes:
        if next(refusals, False):
            now[0] += 1000  # a slow answer
            slow_down(RemoteObject("k", "e", 1, 0), 0)
        return b"k"

    transfers = Transfers(clock=lambda: now[0], pause_secs=0)
    assert transfers.copy(read, 1, threading.Event()) == b"k"


def test_an_overload_without_end_is_an_error() -> None:
    now = [0.0]

    def read() -> bytes:
        now[0] += 100
        slow_down(RemoteObject("k", "e", 1, 0), 0)
        return b""

    transfers = Transfers(clock=lambda: now[0], pause_secs=0)
    with pytest.raises(RemoteError, match="SlowDown"):
        transfers.copy(read, 1, threading.Event())
    assert now[0] == 300


def test_at_most_16_parts_are_in_flight(
    store: MemoryStore, mirror_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/1/weights", b"a" * 64 * 100)
    lock, running, most = threading.Lock(), [0], [0]
    full = threading.Event()

    def count(each: RemoteObject, start: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 16:
                full.set()
        full.wait(SOON_SECS)
        time.sleep(0)
        with lock:
            running[0] -= 1

    mirror = mirror_of(store)
    store.before_read = count
    mirror.folder("a").fetch()
    assert most[0] == 16


@pytest.mark.parametrize(("secs", "lines"), [(0, 2), (3600, 0)])
def test_progress_is_reported_after_some_time(
    monkeypatch: pytest.MonkeyPatch, secs: float, lines: int
) -> None:
    monkeypatch.setattr(downloads, "REPORT_SECS", secs)
    seen: list[DownloadProgress] = []
    report = rarely(seen.append)
    for _ in range(2):
        report(DownloadProgress())
    assert len(seen) == lines


CHILD = """
import sys
from pathlib import Path
from gateway.storage.mirror import blobs, downloads
from gateway.storage.mirror.blobs import Blob, Blobs
from gateway.storage.remote.objects import RemoteObject

blobs.PART_BYTES = 64
partial = Blobs(Path(sys.argv[1])).open_partial(Blob.of("s3://b", RemoteObject("k", "e", 640, 0)))
for part in range(5):
    partial.write(part, [b"x" * 64])
sys.stdout.write("half\\n")
sys.stdout.flush()
sys.stdin.readline()
"""


def test_a_download_of_a_process_that_is_killed_is_continued_by_another(root: Path) -> None:
    store = MemoryStore("s3://b")
    store.put("k", b"x" * 640)
    object = store.list().objects[0]
    blob = Blob.of("s3://b", RemoteObject("k", "e", 640, 0))
    command = [sys.executable, "-W", "error", "-c", CHILD, str(root)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            seen: list[int] = []

            def report(progress: DownloadProgress) -> None:
                seen.append(progress.done)
                if len(seen) == 3:
                    process.send_signal(signal.SIGKILL)

            starts: list[int] = []
            store.before_read = lambda each, start: starts.append(start)
            wanted = [Blob(blob.key, object)]
            Download(store, Blobs(root), Transfers()).run(wanted, report)
        finally:
            process.kill()
    assert seen[:3] == [320, 320, 320]
    assert seen[-1] == 640
    assert sorted(starts) == [320, 384, 448, 512, 576]
    assert Blobs(root).path(blob.key).read_bytes() == b"x" * 640
    assert not Blobs(root).is_damaged(blob.key)
    assert list((root / "partial").iterdir()) == []


def test_a_part_may_be_synced_after_the_last_one_was_published(root: Path) -> None:
    blobs = Blobs(root)
    blob = Blob.of("s3://b", RemoteObject("k", "e", 128, 0))
    partial = blobs.open_partial(blob)
    assert partial is not None
    assert not partial.write(0, [b"x" * 64])
    assert partial.write(1, [b"x", b"y" * 63])
    blobs.publish(partial)
    partial.flush()
    assert blobs.path(blob.key).read_bytes() == b"x" * 65 + b"y" * 63
    assert not blobs.is_damaged(blob.key)


def test_the_parts_of_another_start_of_the_machine_are_not_trusted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = Blob.of("s3://b", RemoteObject("k", "e", 640, 0))
    first = Blobs(root).open_partial(blob)
    assert first is not None
    first.write(0, [b"x" * 64])
    first.close()
    again = Blobs(root).open_partial(blob)
    assert again is not None
    assert again.missing == list(range(1, 10))
    again.close()
    monkeypatch.setattr("gateway.storage.mirror.blobs.BOOT_ID", root / "another")
    last = Blobs(root).open_partial(blob)
    assert last is not None
    assert last.missing == list(range(10))
    last.discard()
