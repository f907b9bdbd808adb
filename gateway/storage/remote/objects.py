"""Objects below one prefix of a bucket: listed, and read in parts."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from gateway.storage.remote.addresses import Address
from gateway.storage.remote.credentials import CredentialError
from gateway.storage.remote.failures import REFUSED, SLOW_DOWN, code_of, explained, words_of
from gateway.storage.remote.storage_clock import StorageClock

Bytes = bytes | memoryview
"""The type of what is read; it has the buffer protocol."""
Taken = TypeVar("Taken")
CHUNK_BYTES = 256 << 10
"""The least size of a chunk but the last one of a read: small enough for the processor's cache."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
PAGE = 1000
"""The most objects in one page of a listing, at each of the three."""
TRITON = {
    "s3": "Unable to create S3 filesystem client. Check account credentials.",
    "gs": "Unable to create GCS client. Check account credentials.",
    "as": "Unable to create Azure filesystem client. Check account credentials.",
}
"""Triton's words for a bucket that is missing or refuses."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One object; `key` is relative to the prefix, `etag` has no quotes."""

    key: str
    etag: str
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class RemoteListing:
    """All objects below a prefix, by key, at the storage's own time.

    `folders` are the keys of empty objects that stand for folders: tools of the clouds make them.
    """

    objects: tuple[RemoteObject, ...]
    at: datetime | None = None
    folders: tuple[str, ...] = ()


class RemoteError(Exception):
    """A request that failed.

    `code` is that of the storage (`NoSuchBucket`, `AccessDenied`, `SlowDown`), or else
    `HostNotFound`, `CannotConnect`, `Timeout`, `Interrupted`, `Credentials` or the status. The
    text has neither secrets nor queries.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_slow_down(self) -> bool:
        """Whether the storage asks for fewer requests: the same one succeeds later."""
        return self.code in SLOW_DOWN


class ObjectChanged(RemoteError):
    """An object that is gone, or not the one that was listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limits of one request: retries with growing pauses, and silence of the storage."""

    retries: int
    within_s: float
    connect_s: float = 5
    silence_s: float = 30
    whole_s: float = 300

    def retry_config(self) -> dict[str, Any]:
        """The retries, in obstore's form."""
        backoff = {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=15),
            "base": 2,
        }
        within = timedelta(seconds=self.within_s)
        return {"max_retries": self.retries, "retry_timeout": within, "backoff": backoff}

    def client_options(self) -> dict[str, Any]:
        """The time limits, in obstore's form."""
        return {
            "connect_timeout": timedelta(seconds=self.connect_s),
            "read_timeout": timedelta(seconds=self.silence_s),
            "timeout": timedelta(seconds=self.whole_s),
        }


LISTED = Patience(retries=10, within_s=180)
FIRST = Patience(retries=1, within_s=3, connect_s=2, silence_s=3, whole_s=10)
"""Patience of the listing at a start that can do without it."""
READ = Patience(retries=2, within_s=600, whole_s=600)
"""A read fails soon, so that its caller makes fewer of them at once and reads again."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A client of obstore, and the URL of its storage.

    `unsigned` says why requests have no signature; empty if they have one.
    """

    client: Any
    url: str
    unsigned: str


Connect = Callable[[Patience], Connection]
"""A connection with the credentials that apply now."""


class ObjectStore:
    """The objects below an address. Methods block, and are safe in concurrent threads.

    Credentials are read again once if the storage refuses a request.
    """

    def __init__(
        self, address: Address, connect: Connect, listed: Patience, read: Patience
    ) -> None:
        self.origin = address.origin
        self._address = address
        self._connect = connect
        self._listing = _Client(connect, listed)
        self._reading = _Client(connect, read)
        self._clock = StorageClock()

    def list(self, under: str = "", patience: Patience | None = None) -> RemoteListing:
        """All objects below the folder `under`; their keys are relative to the prefix all the same.

        `patience` replaces the store's own for this listing.
        A bucket without such objects gives an empty listing, a missing bucket RemoteError.
        """
        prefix = "/".join(part for part in (self._address.prefix, under) if part)

        def listed(connection: Connection) -> tuple[Any, list[Any]]:
            import obstore

            pages = obstore.list(connection.client, prefix or None, chunk_size=PAGE)
            entries = [entry for page in pages for entry in page]
            return self._clock.now(connection.url), entries

        try:
            client = _Client(self._connect, patience) if patience else self._listing
            at, entries = client.call(listed, f"list '{self._named(under)}'")
        except ObjectChanged as error:
            raise self._unusable(error) from None
        except RemoteError as error:
            raise (self._unusable(error) if error.code in UNUSABLE else error) from None
        return _listing(entries, self._address.prefix, at)

    def read(
        self,
        object: RemoteObject,
        start: int,
        length: int,
        take: Callable[[Iterable[Bytes]], Taken],
    ) -> Taken:
        """The result of `take`, whose argument is exactly `length` bytes of one object, in chunks.

        It is called again, from the start, if the storage refuses the request in between.
        ObjectChanged if the object is not as listed. A failure that asks for fewer requests has
        been retried only a few times.
        """
        if length == 0:
            return take(())
        key = "/".join(part for part in (self._address.prefix, object.key) if part)
        match = f'"{object.etag}"' if object.etag else None
        what = f"read '{self._named(object.key)}'"

        def got(connection: Connection) -> Taken:
            import obstore

            result = obstore.get(
                connection.client,
                key,
                options={"range": (start, start + length), "if_match": match},
            )
            # A storage may ignore `If-Match`.
            if _etag(result.meta) != object.etag or result.meta["size"] != object.size:
                raise _not_listed(what)
            return take(_exactly(length, result.stream(min_chunk_size=CHUNK_BYTES), what))

        return self._reading.call(got, what)

    def _named(self, key: str) -> str:
        return f"{self.origin}/{key}" if key else self.origin

    def _unusable(self, error: RemoteError) -> RemoteError:
        return RemoteError(error.code, f"{TRITON[self._address.scheme]} {error}")


UNUSABLE = {*REFUSED, "Credentials", "ContainerNotFound", "NoSuchBucket", "RequestTimeTooSkewed"}


class _Client:
    """A connection, made at the first call, and anew if the storage refuses it."""

    def __init__(self, connect: Connect, patience: Patience) -> None:
        self._connect = connect
        self._patience = patience
        self._lock = threading.Lock()
        self._made: Connection | None = None

    def call(self, work: Callable[[Connection], Taken], what: str) -> Taken:
        """The result of `work` with the connection; RemoteError that says `what` failed."""
        used = self._current(None, what)
        try:
            return self._tried(used, work, what)
        except RemoteError as error:
            if error.code not in REFUSED:
                raise
        return self._tried(self._current(used, what), work, what)

    def _current(self, refused: Connection | None, what: str) -> Connection:
        with self._lock:
            if self._made is None or self._made is refused:
                self._made = self._connected(what)
            return self._made

    def _connected(self, what: str) -> Connection:
        from obstore.exceptions import BaseError

        try:
            return self._connect(self._patience)
        except CredentialError as error:
            raise RemoteError("Credentials", f"cannot {what}: {error}") from None
        except (BaseError, ValueError) as error:
            raise RemoteError("Credentials", f"cannot {what}: {words_of(error)}") from None

    def _tried(self, used: Connection, work: Callable[[Connection], Taken], what: str) -> Taken:
        from obstore.exceptions import BaseError, PreconditionError

        try:
            return work(used)
        except (FileNotFoundError, PreconditionError) as error:
            raise ObjectChanged(code_of(error), explained(what, error)) from None
        except (BaseError, ValueError) as error:
            code, text = code_of(error), explained(what, error)
            if code in REFUSED and used.unsigned:
                text = f"{text}; the request was not signed: {used.unsigned}"
            raise RemoteError(code, text) from None


def _exactly(length: int, chunks: Iterable[Bytes], what: str) -> Iterator[Bytes]:
    """The chunks; ObjectChanged before one behind the length, or at the end if some are missing."""
    for chunk in chunks:
        length -= len(chunk)
        if length < 0:
            break
        yield chunk
    if length:  # A storage shortens a range that ends behind the object.
        raise _not_listed(what)


def _not_listed(what: str) -> ObjectChanged:
    return ObjectChanged("PreconditionFailed", f"cannot {what}: it is not the one listed")


def _listing(entries: Sequence[Any], prefix: str, at: datetime | None) -> RemoteListing:
    skipped = len(prefix) + 1 if prefix else 0
    found = {entry["path"][skipped:]: entry for entry in entries}
    parents = {key[: slash.start()] for key in found for slash in re.finditer("/", key)}
    folders = {key for key in found if found[key]["size"] == 0 and _is_folder(key, parents)}
    objects = tuple(_object(key, found[key]) for key in sorted(found.keys() - folders))
    return RemoteListing(objects, at, tuple(sorted(folders - {""})))


def _is_folder(key: str, parents: set[str]) -> bool:
    """Whether an empty object stands for a folder; a listing has lost the slash at its end.

    The version of an ensemble is an empty folder, and exists only so.
    """
    _, _, version = key.partition("/")
    return key == "" or key in parents or version.isdecimal()


def _object(key: str, entry: Any) -> RemoteObject:
    modified_ns = (entry["last_modified"] - EPOCH) // MICROSECOND * 1000
    return RemoteObject(key, _etag(entry), entry["size"], modified_ns)


def _etag(entry: Any) -> str:
    return (entry["e_tag"] or "").strip('"')
