"""Objects below one prefix of a bucket: listed, and read in parts."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from gateway.storage.remote.addresses import Address

Bytes = bytes | memoryview
"""What a read returns has the buffer protocol."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
PAGE = 1000
"""Objects of one page of a listing, at most, at each of the three."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One object; `key` is relative to the prefix, `etag` has no quotes."""

    key: str
    etag: str
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects below a prefix, by key, at the storage's own time.

    `folders` are the keys of empty objects that stand for folders: tools of the clouds make them.
    """

    objects: tuple[RemoteObject, ...]
    at: datetime | None = None
    folders: tuple[str, ...] = ()


class RemoteError(Exception):
    """A request that the storage refused or never answered.

    `code` is that of the storage (`NoSuchBucket`, `AccessDenied`, `SlowDown`), or else
    `HostNotFound`, `CannotConnect`, `Timeout`, `Interrupted` or the status. The text has neither
    secrets nor queries.
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


SLOW_DOWN = ("SlowDown", "ServerBusy", "TooManyRequests", "429", "503", "ServiceUnavailable")


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
READ = Patience(retries=2, within_s=30)
"""A read fails soon, so that its caller makes fewer of them at once and reads again."""

Connect = Callable[[Address, Patience], Any]
"""A client of obstore with the credentials that apply now."""


class ObjectStore:
    """The objects below an address. Methods block, and are safe in concurrent threads.

    The credentials are read again once if the storage refuses a request.
    """

    def __init__(self, address: Address, connect: Connect) -> None:
        self.origin = str(address)
        self._address = address
        self._listing = _Client(address, connect, LISTED)
        self._reading = _Client(address, connect, READ)

    def list(self, under: str = "") -> Listing:
        """All objects whose key begins with the folder `under`; keys stay those of the prefix."""
        prefix = "/".join(part for part in (self._address.prefix, under) if part)

        def listed(client: Any) -> list[Any]:
            import obstore

            pages = obstore.list(client, prefix or None, chunk_size=PAGE)
            return [entry for page in pages for entry in page]

        entries = self._listing.call(listed, f"list '{self._named(under)}'")
        return _listing(entries, self._address.prefix)

    def read(self, object: RemoteObject, start: int, length: int) -> Bytes:
        """Bytes of one object, exactly `length`; ObjectChanged if it is not as listed."""
        if length == 0:
            return b""

        def got(client: Any) -> Any:
            import obstore

            match = f'"{object.etag}"' if object.etag else None
            result = obstore.get(
                client,
                self._key(object.key),
                options={"range": (start, start + length), "if_match": match},
            )
            return result.meta, result.bytes()

        what = f"read '{self._named(object.key)}'"
        meta, content = self._reading.call(got, what)
        # A storage may ignore `If-Match`.
        if _etag(meta) != object.etag or meta["size"] != object.size or len(content) != length:
            raise ObjectChanged("PreconditionFailed", f"cannot {what}: it is not the one listed")
        return content  # type: ignore[no-any-return]

    def _key(self, key: str) -> str:
        return f"{self._address.prefix}/{key}" if self._address.prefix else key

    def _named(self, key: str) -> str:
        return f"{self.origin}/{key}" if key else self.origin


class _Client:
    """A client of obstore, made at the first call, and anew if the storage refuses it."""

    def __init__(self, address: Address, connect: Connect, patience: Patience) -> None:
        self._make = partial(connect, address, patience)
        self._lock = threading.Lock()
        self._made: Any = None

    def call(self, work: Callable[[Any], Any], what: str) -> Any:
        """What `work` does with the client; RemoteError that says `what` failed."""
        client = self._current(None)
        try:
            return self._tried(client, work, what)
        except RemoteError as error:
            if error.code not in REFUSED:
                raise
        return self._tried(self._current(client), work, what)

    def _current(self, refused: Any) -> Any:
        with self._lock:
            if self._made is refused:
                self._made = self._make()
            return self._made

    def _tried(self, client: Any, work: Callable[[Any], Any], what: str) -> Any:
        from obstore import exceptions

        try:
            return work(client)
        except (FileNotFoundError, exceptions.PreconditionError) as error:
            raise ObjectChanged(_code(str(error)), _text(what, str(error))) from None
        except (exceptions.BaseError, ValueError) as error:
            raise RemoteError(_code(str(error)), _text(what, str(error))) from None


REFUSED = (
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "AuthenticationFailed",
    "401",
    "403",
)

STATUS = re.compile(r"status code: (\d{3})")
FIELD = "<{0}>([^<]*)</{0}>"
KIND = re.compile(r"kind: (Connect|Timeout|Request|Interrupted|Decode|Body)")


def _code(error: str) -> str:
    if found := re.search(FIELD.format("Code"), error):
        return found[1]
    if found := STATUS.search(error):
        return found[1]
    if '"dns error"' in error:
        return "HostNotFound"
    kind = KIND.search(error)
    if kind is None:
        return "Error"
    return {"Connect": "CannotConnect", "Timeout": "Timeout"}.get(kind[1], "Interrupted")


def _text(what: str, error: str) -> str:
    status = STATUS.search(error)
    message = re.search(FIELD.format("Message"), error)
    code = _code(error)
    found = " ".join(dict.fromkeys([*([status[1]] if status else []), code]))
    return f"cannot {what}: {found}" + (f": {message[1]}" if message else "")


def _listing(entries: Sequence[Any], prefix: str) -> Listing:
    skipped = len(prefix) + 1 if prefix else 0
    found = {entry["path"][skipped:]: entry for entry in entries}
    parents = {key[:at] for key in found for at in range(len(key)) if key[at] == "/"}
    folders = {key for key in found if found[key]["size"] == 0 and _is_folder(key, parents)}
    objects = tuple(_object(key, found[key]) for key in sorted(found.keys() - folders))
    return Listing(objects, folders=tuple(sorted(folders - {""})))


def _is_folder(key: str, parents: set[str]) -> bool:
    """Whether an empty object stands for a folder; listings have lost the slash at its end."""
    _, _, version = key.partition("/")
    return key == "" or key in parents or version.isdecimal()


def _object(key: str, entry: Any) -> RemoteObject:
    modified_ns = (entry["last_modified"] - EPOCH) // MICROSECOND * 1000
    return RemoteObject(key, _etag(entry), entry["size"], modified_ns)


def _etag(entry: Any) -> str:
    return (entry["e_tag"] or "").strip('"')
