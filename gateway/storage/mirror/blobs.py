"""Content of remote objects on disk: one file for each version of an object, whole or partial."""

import errno
import hashlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.storage.mirror.locks import CacheLock
from gateway.storage.remote.objects import Bytes, RemoteObject

GIB = 1 << 30
PART_BYTES = 16 << 20
READ_BYTES = 1 << 20
KEY_BYTES = 20
READ_ONLY = 0o444
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Blob:
    """One version of an object of a repository, and the name of its content in the cache."""

    key: str
    object: RemoteObject

    @classmethod
    def of(cls, origin: str, object: RemoteObject) -> "Blob":
        """The blob of an object; `origin` is the address of its repository."""
        text = json.dumps([origin, object.key, object.etag, object.size])
        return cls(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest(), object)

    @property
    def parts(self) -> int:
        """The number of its parts, which are downloaded separately."""
        return -(-self.object.size // PART_BYTES)


class Blobs:
    """The folder of blobs, of partial blobs, and of their checksums; shared by processes."""

    def __init__(self, root: Path) -> None:
        self._whole = root / "blobs"
        self._partial = root / "partial"
        self._checksums = root / "checksums"

    def path(self, key: str) -> Path:
        """The file of a blob, whether it is there or not."""
        return self._whole / key[:2] / key

    def has(self, key: str) -> bool:
        """Whether the blob is there; it is whole then."""
        return self.path(key).exists()

    def open_partial(self, blob: Blob) -> "PartialBlob | None":
        """The partial blob, new or from an earlier attempt; None if it is open elsewhere."""
        self._partial.mkdir(parents=True, exist_ok=True)
        self._checksums.mkdir(exist_ok=True)
        self.path(blob.key).parent.mkdir(parents=True, exist_ok=True)
        lock = CacheLock.attempt(self._partial / f"{blob.key}.lock", create=True)
        if lock is None:
            return None
        try:
            return PartialBlob(blob, self._partial / blob.key, lock)
        except BaseException:
            lock.delete()
            raise

    def publish(self, partial: "PartialBlob") -> None:
        """Make a partial blob that has all its parts a whole one."""
        key, path = partial.blob.key, self.path(partial.blob.key)
        checksums = {"part_bytes": PART_BYTES, "crc32": partial.seal()}
        (self._checksums / key).write_text(json.dumps(checksums))
        partial.data.rename(path)
        partial.discard()
        sync(path.parent)

    def done_elsewhere(self, blob: Blob) -> int:
        """Bytes of a blob that another process is downloading."""
        with suppress(OSError):
            done = (self._partial / blob.key / "parts").read_bytes().count(1)
            return min(done * PART_BYTES, blob.object.size)
        return 0

    def sizes(self) -> dict[str, int]:
        """The size of each whole blob."""
        found = {}
        for each in _entries(self._whole, "*/*"):
            with suppress(FileNotFoundError):
                found[each.name] = each.stat().st_size
        return found

    def partials(self) -> dict[str, int]:
        """The size on disk of each partial blob, which is that of its whole content."""
        found = {}
        for each in _entries(self._partial, "*/data"):
            with suppress(FileNotFoundError):
                found[each.parent.name] = each.stat().st_size
        return found

    def whole_since(self, key: str) -> float:
        """The time at which a blob became whole; 0 if that is unknown."""
        try:
            return (self._checksums / key).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def delete(self, key: str) -> None:
        """Delete a whole blob."""
        self.path(key).unlink(missing_ok=True)
        (self._checksums / key).unlink(missing_ok=True)

    def delete_partial(self, key: str) -> bool:
        """Delete a partial blob; False if it is being downloaded."""
        lock = CacheLock.attempt(self._partial / f"{key}.lock", create=True)
        if lock is None:
            return False
        shutil.rmtree(self._partial / key, ignore_errors=True)
        lock.delete()
        return True

    def is_damaged(self, key: str) -> bool:
        """Whether the content of a blob is another one than that which was downloaded."""
        try:
            kept = json.loads((self._checksums / key).read_bytes())
            with self.path(key).open("rb") as file:
                size, part = os.fstat(file.fileno()).st_size, kept["part_bytes"]
                found = [
                    _checksum(file.fileno(), start, min(part, size - start))
                    for start in range(0, size, part)
                ]
            return bool(found != kept["crc32"])
        except FileNotFoundError:
            return self.has(key)
        except (OSError, ValueError, KeyError, TypeError):  # an unreadable sector, torn checksums
            return True


class PartialBlob:
    """A blob whose parts are written in any order, by concurrent threads; `parts` is their map.

    A later process continues it, until the next start of the machine: the map is not synced. It
    `is_lost` once a sync has failed: a later sync would succeed without the parts that were lost.
    """

    def __init__(self, blob: Blob, folder: Path, lock: CacheLock) -> None:
        self.blob = blob
        self.data = folder / "data"
        self._folder = folder
        self._lock = lock
        self._parts = folder / "parts"
        self._changing = threading.Lock()
        self._flushing = threading.Lock()
        self.is_lost = False
        if not self._is_continued():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            self._create()
        self._done = bytearray(self._parts.read_bytes())
        self._checksums: list[int | None] = [None] * len(self._done)
        self.done_bytes = sum(self.span(part)[1] for part, done in enumerate(self._done) if done)
        """Bytes of the parts that are there."""
        self._file = os.open(self.data, os.O_RDWR | os.O_CLOEXEC)
        self._map = os.open(self._parts, os.O_RDWR | os.O_CLOEXEC)
        self._descriptors = [self._file, self._map]

    @property
    def missing(self) -> list[int]:
        """The numbers of the parts that are missing."""
        return [number for number, done in enumerate(self._done) if not done]

    def span(self, part: int) -> tuple[int, int]:
        """Start and length of a part."""
        start = part * PART_BYTES
        return start, min(PART_BYTES, self.blob.object.size - start)

    def write(self, part: int, chunks: Iterable[Bytes]) -> bool:
        """Write one part; returns whether no part is missing any more."""
        (at, length), checksum = self.span(part), 0
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            view = memoryview(chunk)
            while view:
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written
        with self._changing:
            os.pwrite(self._map, b"\1", part)
            self._checksums[part] = checksum
            self._done[part] = 1
            self.done_bytes += length
            return all(self._done)

    def flush(self) -> None:
        """Sync the present parts, so that `seal` waits for fewer; nothing once it is closed.

        One thread at a time does, for the parts of all.
        """
        if self._flushing.acquire(blocking=False):
            try:
                if self._descriptors:
                    self._sync(os.fdatasync)
            finally:
                self._flushing.release()

    def seal(self) -> list[int]:
        """Sync the whole content; returns the CRC-32 of each part.

        Those of an earlier attempt are read.
        """
        found = [
            _checksum(self._file, *self.span(part)) if known is None else known
            for part, known in enumerate(self._checksums)
        ]
        os.fchmod(self._file, READ_ONLY)
        modified = self.blob.object.modified_ns
        os.utime(self._file, ns=(modified, modified))
        with self._flushing:
            self._sync(os.fsync)
        return found

    def _sync(self, sync: Callable[[int], None]) -> None:
        if self.is_lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        try:
            sync(self._file)
        except OSError:
            self.is_lost = True
            raise

    def close(self) -> None:
        """Leave the parts to a later attempt; idempotent."""
        with self._flushing:
            while self._descriptors:
                os.close(self._descriptors.pop())
        self._lock.close()

    def discard(self) -> None:
        """Close it and delete its files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.path.unlink(missing_ok=True)
        self.close()

    def _is_continued(self) -> bool:
        try:
            return (
                (self._folder / "boot").read_text() == _boot()
                and self.data.stat().st_size == self.blob.object.size
                and self._parts.stat().st_size == self.blob.parts
            )
        except FileNotFoundError:
            return False

    def _create(self) -> None:
        descriptor = os.open(self.data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if self.blob.object.size:
                os.posix_fallocate(descriptor, 0, self.blob.object.size)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)
        self._parts.write_bytes(bytes(self.blob.parts))
        (self._folder / "boot").write_text(_boot())


def _checksum(file: int, start: int, length: int) -> int:
    """The CRC-32 of a part of a file."""
    found, end = 0, start + length
    for at in range(start, end, READ_BYTES):
        found = zlib.crc32(os.pread(file, min(READ_BYTES, end - at), at), found)
    return found


def sync(path: Path) -> None:
    """Sync a folder or a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _boot() -> str:
    return BOOT_ID.read_text() if BOOT_ID.exists() else ""


def _entries(folder: Path, pattern: str) -> Iterator[Path]:
    return (each for each in folder.glob(pattern) if each.is_file())
