"""Downloads of blobs: in parts, concurrent, resumed, and shared with other processes."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from gateway.storage.mirror.blobs import GIB, PART_BYTES, Blob, Blobs, PartialBlob
from gateway.storage.mirror.errors import DownloadStopped, disk_error
from gateway.storage.remote.objects import (
    Bytes,
    Patience,
    RemoteError,
    RemoteListing,
    RemoteObject,
    Taken,
)
from gateway.storage.store import NO_SPACE

UNITS = 32
"""The units of all requests in flight: a part takes two, a small object one."""
SMALL_BYTES = PART_BYTES // 2
RECOVERY_SECS = 30.0
SLOW_SECS = 180.0
LONGEST_PAUSE_SECS = 15.0
TURN_SECS = 0.2
NO_PART = -1
"""The part of a blob that lacks none: it is empty, or its last process died before the end."""
REPORT_SECS = 10.0
OPEN = 64
"""Partial blobs of one download that are open at once."""


class RemoteStore(Protocol):
    """The objects below an address; the methods block, and raise RemoteError."""

    origin: str

    def list(self, under: str = "", patience: Patience | None = None) -> RemoteListing:
        """All objects below a folder; `patience` replaces the store's own."""

    def read(
        self,
        object: RemoteObject,
        start: int,
        length: int,
        take: Callable[[Iterable[Bytes]], Taken],
    ) -> Taken:
        """Bytes of an object, taken in chunks; ObjectChanged if it is another version now."""


class Transfers:
    """The bound of all downloads of a server, and counts of their requests and bytes.

    If the storage asks for fewer requests the bound is halved, once for all requests that were in
    flight then; it grows by a part in 30 s.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, pause_secs: float = 1.0
    ) -> None:
        self._clock = clock
        self._pause_secs = pause_secs
        self._changed = threading.Condition()
        self._halved, self._halved_at, self._halvings = UNITS, clock(), 0
        self._in_flight = 0
        self.bytes = 0
        self.requests = 0

    @property
    def bound(self) -> int:
        """The units that may be in flight now."""
        grown = int((self._clock() - self._halved_at) / RECOVERY_SECS) * 2
        return min(UNITS, self._halved + grown)

    def copy(self, part: Callable[[], Taken], size: int, stopped: threading.Event) -> Taken:
        """The result of `part`, which reads and writes bytes of that size.

        It is repeated while the storage is overloaded.
        """
        pause, deadline = self._pause_secs, math.inf
        while True:
            with self._slot(1 if size <= SMALL_BYTES else 2) as halvings:
                if stopped.is_set():
                    raise DownloadStopped("the download was stopped")
                try:
                    return part()
                except RemoteError as error:
                    if not error.is_slow_down or self._clock() > deadline:
                        raise
                    deadline = min(deadline, self._clock() + SLOW_SECS)
                    self._slow_down(halvings)
                    self.count()
            stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECS)

    @contextmanager
    def _slot(self, units: int) -> Iterator[int]:
        """Units of the bound; gives the number of halvings before."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight + units <= self.bound)
            self._in_flight += units
            halvings = self._halvings
        try:
            yield halvings
        finally:
            with self._changed:
                self._in_flight -= units
                self._changed.notify_all()

    def count(self, size: int = 0) -> None:
        """Count a request, and the bytes that it returned."""
        with self._changed:
            self.requests += 1
            self.bytes += size

    def _slow_down(self, halvings: int) -> None:
        with self._changed:
            if halvings == self._halvings:
                self._halved, self._halved_at = max(2, self.bound // 2), self._clock()
                self._halvings += 1


@dataclass(slots=True)
class DownloadProgress:
    """Bytes that a load needs, and how many of them are there."""

    total: int = 0
    done: int = 0

    def __str__(self) -> str:
        return f"{self.done / GIB:.1f} of {self.total / GIB:.1f} GiB"


Report = Callable[[DownloadProgress], None]


def rarely(report: Report) -> Report:
    """The report, called every 10 s."""
    next_at = time.monotonic() + REPORT_SECS

    def reported(progress: DownloadProgress) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at += REPORT_SECS
            report(progress)

    return reported


@dataclass(frozen=True, slots=True)
class Download:
    """The download of blobs from one repository; it ends early once `stopped` is set."""

    store: RemoteStore
    blobs: Blobs
    transfers: Transfers
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, wanted: Sequence[Blob], report: Report) -> None:
        """Download the blobs that are missing.

        Blobs that another process downloads are waited for; if it dies, they are continued here.
        Raises ObjectChanged, RemoteError, MirrorError.
        """
        try:
            _Run(self, wanted, report).run()
        except OSError as error:
            raise disk_error(error) from None


class _Run:
    """The state of a download."""

    def __init__(self, of: Download, wanted: Sequence[Blob], report: Report) -> None:
        self._of = of
        self._report = report
        self._progress = DownloadProgress(total=sum(each.object.size for each in wanted))
        missing = [each for each in wanted if not of.blobs.has(each.key)]
        self._base = self._progress.total - sum(each.object.size for each in missing)
        self._queue = deque(sorted(missing, key=lambda each: -each.object.size))
        self._elsewhere: list[Blob] = []
        self._partials: list[PartialBlob] = []
        self._parts: deque[tuple[PartialBlob, int]] = deque()
        self._running: set[Future[None]] = set()
        self._ended = threading.Event()

    def run(self) -> None:
        with ThreadPoolExecutor(UNITS, "download") as self._threads:
            try:
                while self._queue or self._elsewhere or self._parts or self._running:
                    self._turn()
            except BaseException as error:
                self._abandon(error)
                raise
        self._show()

    def _turn(self) -> None:
        if not self._queue:  # those elsewhere may have been left by a process that died
            self._queue, self._elsewhere = deque(self._elsewhere), []
        self._begin()
        if self._running:
            done, self._running = wait(self._running, TURN_SECS, FIRST_COMPLETED)
            for each in done:
                each.result()
        elif self._elsewhere:
            self._of.stopped.wait(TURN_SECS)
        for partial in [each for each in self._partials if self._of.blobs.has(each.blob.key)]:
            self._partials.remove(partial)
            self._base += partial.blob.object.size
        self._show()
        if self._of.stopped.is_set():
            raise DownloadStopped("the load was ended")

    def _begin(self) -> None:
        while len(self._running) < UNITS and (self._parts or self._open_next()):
            if self._parts:
                partial, part = self._parts.popleft()
                self._running.add(self._threads.submit(self._copy, partial, part))

    def _open_next(self) -> bool:
        """Open the next partial blob; False if there is none now."""
        if not self._queue or len(self._partials) >= OPEN:
            return False
        blob = self._queue.popleft()
        if self._of.blobs.has(blob.key):
            self._base += blob.object.size
        elif (partial := self._of.blobs.open_partial(blob)) is None:
            self._elsewhere.append(blob)
        elif self._of.blobs.has(blob.key):  # published before the lock was free
            partial.discard()
            self._base += blob.object.size
        else:
            self._partials.append(partial)
            self._parts.extend((partial, part) for part in partial.missing or [NO_PART])
        return True

    def _copy(self, partial: PartialBlob, part: int) -> None:
        if part == NO_PART:
            self._of.blobs.publish(partial)
            return
        start, length = partial.span(part)
        store, transfers = self._of.store, self._of.transfers

        def copied() -> bool:
            whole = store.read(
                partial.blob.object, start, length, lambda chunks: partial.write(part, chunks)
            )
            transfers.count(length)
            return whole

        if transfers.copy(copied, length, self._ended):
            self._of.blobs.publish(partial)
        else:
            partial.flush()

    def _show(self) -> None:
        done = self._base + sum(each.done_bytes for each in self._partials)
        done += sum(map(self._of.blobs.done_elsewhere, self._elsewhere))
        self._progress.done = done
        self._report(self._progress)

    def _abandon(self, error: BaseException) -> None:
        self._ended.set()
        self._threads.shutdown(cancel_futures=True)
        is_full = isinstance(error, OSError) and error.errno in NO_SPACE
        for partial in self._partials:
            if is_full or partial.is_lost:
                partial.discard()
            else:
                partial.close()
