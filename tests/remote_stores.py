"""A bucket in memory for tests of mirrors, with counts of requests and faults to order."""

import hashlib
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from gateway.storage.remote.objects import (
    Bytes,
    ObjectChanged,
    Patience,
    RemoteError,
    RemoteListing,
    RemoteObject,
    Taken,
)

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
NS = 10**9


class MemoryStore:
    """Objects of one prefix; `put` and `delete` are those of other programs.

    `down` makes every request fail. `patience` is that of the last listing. `before_read` is
    called in each read, and may raise; so may `before_list`, in each listing.
    """

    def __init__(self, origin: str = "s3://bucket/models") -> None:
        self.origin = origin
        self.at = NOW
        self.down = False
        self.lists: list[str] = []
        self.reads: list[str] = []
        self.patience: Patience | None = None
        self.before_read: Callable[[RemoteObject, int], None] = lambda each, start: None
        self.before_list: Callable[[], None] = lambda: None
        self._contents: dict[str, bytes] = {}
        self._listed: dict[str, RemoteObject] = {}
        self._folders: set[str] = set()
        self._lock = threading.Lock()

    def put(self, key: str, content: bytes = b"", age_secs: float = 3600) -> None:
        """Write an object, as old as that at the storage's present time."""
        modified = int(self.at.timestamp() - age_secs) * NS
        etag = hashlib.md5(content, usedforsecurity=False).hexdigest()
        self._contents[key] = content
        self._listed[key] = RemoteObject(key, etag, len(content), modified)

    def put_folder(self, key: str) -> None:
        """Write an empty object that stands for a folder."""
        self._folders.add(key)

    def delete(self, under: str) -> None:
        """Delete an object, or all below a folder."""
        for key in [key for key in self._contents if key == under or key.startswith(f"{under}/")]:
            del self._contents[key], self._listed[key]

    def list(self, under: str = "", patience: Patience | None = None) -> RemoteListing:
        self.lists.append(under)
        self.patience = patience
        self._require_up()
        self.before_list()
        start = f"{under}/" if under else ""
        found = [each for key, each in sorted(self._listed.items()) if key.startswith(start)]
        folders = [each for each in sorted(self._folders) if each.startswith(start)]
        return RemoteListing(tuple(found), self.at, tuple(folders))

    def read(
        self,
        object: RemoteObject,
        start: int,
        length: int,
        take: Callable[[Iterable[Bytes]], Taken],
    ) -> Taken:
        with self._lock:
            self.reads.append(object.key)
        self._require_up()
        self.before_read(object, start)
        if self._listed.get(object.key) != object:
            raise ObjectChanged("PreconditionFailed", f"cannot read '{object.key}': it has changed")
        content = self._contents[object.key][start : start + length]
        if len(content) != length:
            raise ObjectChanged("PreconditionFailed", f"cannot read '{object.key}': it is short")
        return take((content[: length // 2], content[length // 2 :]))

    def _require_up(self) -> None:
        if self.down:
            raise RemoteError("CannotConnect", f"cannot read '{self.origin}': CannotConnect")


def slow_down(object: RemoteObject, start: int) -> None:
    """The fault of a storage that is overloaded."""
    raise RemoteError("SlowDown", f"cannot read '{object.key}': 503 SlowDown")
