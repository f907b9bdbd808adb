"""Key files: TOML with tables `[[keys]]`, which have digests of the keys only."""

import fcntl
import json
import math
import os
import re
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

from gateway.policy.keys import NAME, NAME_FORM, PREFIX, ApiKey, KeyTable, Role

KEYS = "keys"
ID = re.compile(r"[A-Z2-7]{8}")
ID_FORM = "8 of A to Z and 2 to 7"
HASH = re.compile(r"sha256:([0-9a-f]{64})")
HASH_FORM = "sha256: and 64 hexadecimal digits"
TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,256}")
TEXT_FORM = "a text of 1 to 256 characters without control characters"
FIELDS = ("id", "hash", "tenant", "roles", "expires", "note")
REQUIRED = ("id", "hash", "tenant")
BEGIN_OF_KEY = re.compile(r"^[ \t]*\[\[[ \t]*keys[ \t]*\]\]", re.M)
LINE_OF_KEY = re.compile(r"^[ \t]*[^#\s].*$", re.M)
"""A line that is neither empty nor a comment."""
NEW_MODE = 0o600
LOCK_SECS = 10.0
FIRST_YEAR, LAST_YEAR = 1971, 9998
"""Their times are those of the Unix epoch in every zone."""
LOOSE = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO
"""Permissions that a key file must not have."""
LOOSE_PUBLIC = stat.S_IWGRP | stat.S_IWOTH
"""Those that a file of public keys must not have."""

NO_TOML = (ValueError, RecursionError)
"""The errors of `tomllib`: of TOML and of endless numbers, and of deep nesting."""
KEY_SHAPED = re.compile(rf"{PREFIX}[^\s\"']*")


class KeyFileError(Exception):
    """A key file or a key set that cannot be used; the text has what was found and expected.

    With `passes` a later attempt may succeed, although the file has not changed.
    """

    def __init__(self, message: str, *, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes


def without_secrets(text: str) -> str:
    """The text without keys."""
    return KEY_SHAPED.sub(f"{PREFIX}...", text)


def read_key_file(path: Path, *, public: bool = False, most_bytes: int = -1) -> str:
    """The text of a key file; KeyFileError if it is too long, cannot be read, or by too many.

    Others may read a `public` one, but not write it.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            _check_file(found, path, public=public)
            if 0 <= most_bytes < found.st_size:
                raise KeyFileError(f"it has {found.st_size} bytes, expected at most {most_bytes}")
            return file.read(most_bytes).decode()
    except OSError as error:
        raise KeyFileError(f"it cannot be read: {error.strerror}", passes=True) from None
    except UnicodeDecodeError:
        raise KeyFileError("it is no UTF-8 text") from None


def _check_file(found: os.stat_result, path: Path, *, public: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError("it is no file")
    if found.st_uid not in (0, os.geteuid()):
        raise KeyFileError(f"it belongs to user {found.st_uid}, expected {os.geteuid()} or root")
    mode = stat.S_IMODE(found.st_mode)
    loose, may, strict = (LOOSE_PUBLIC, "write", 644) if public else (LOOSE, "read or write", 640)
    if mode & loose:
        raise KeyFileError(
            f"other users may {may} it (mode {mode:04o}), expected 0{strict} or stricter: "
            f"chmod {strict} {path}"
        )


class KeyReader:
    """Reads the texts of a key file.

    Parts that were in the last text are not parsed again, and keys that are equal are the same.
    """

    def __init__(self) -> None:
        self._known: Mapping[bytes, ApiKey] = {}
        self._last: Mapping[str, ApiKey] = {}

    def read(self, text: str) -> KeyTable:
        """The table of a text; KeyFileError if a part of it is wrong."""
        found: dict[str, ApiKey] = {}
        try:
            known = dict(self._read_parts(text, found))
        except NO_TOML:
            # A part alone is no TOML. Either the whole is none, or a line within a text over
            # several lines looks like the beginning of a key.
            found, known = {}, {}
            _add_document(_parsed(text), found)
        last = self._last
        keys = {name: last[name] if last.get(name) == key else key for name, key in found.items()}
        self._known = {mark: keys[key.id] for mark, key in known.items()}
        self._last = keys
        return KeyTable(keys.values())

    def _read_parts(self, text: str, found: dict[str, ApiKey]) -> Iterator[tuple[bytes, ApiKey]]:
        """Read the parts, which begin with a key each; yields keys by a digest of their part."""
        starts = [0, *(each.start() for each in BEGIN_OF_KEY.finditer(text)), len(text)]
        for start, end in pairwise(starts):
            part = text[start:end].strip()
            mark = blake2b(part.encode(), digest_size=16).digest()
            if key := self._known.get(mark):
                _add_key(key, found)
            else:
                document = tomllib.loads(part)
                _add_document(document, found)
                if len(document.get(KEYS, ())) == 1:
                    key = next(reversed(found.values()))
            if key is not None:
                yield mark, key


def _add_document(document: Mapping[str, Any], found: dict[str, ApiKey]) -> None:
    _refuse_unknown(document, (KEYS,), "the file")
    keys = document.get(KEYS, [])
    if not isinstance(keys, list):
        raise KeyFileError(f"'{KEYS}' is no list of tables, expected [[{KEYS}]]")
    for fields in keys:
        _add_key(_key(fields, f"key {len(found) + 1}"), found)


def _add_key(key: ApiKey, found: dict[str, ApiKey]) -> None:
    if key.id in found:
        raise KeyFileError(f"key '{key.id}' is there twice")
    found[key.id] = key


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except NO_TOML as error:
        raise KeyFileError(f"it is no TOML: {without_secrets(str(error))}") from None


def _refuse_unknown(fields: Mapping[str, Any], expected: Collection[str], where: str) -> None:
    for name in fields.keys() - set(expected):
        shown = without_secrets(name)
        raise KeyFileError(f"{where}: unknown field '{shown}', expected {', '.join(expected)}")


def _key(fields: Any, where: str) -> ApiKey:
    if not isinstance(fields, dict):
        raise KeyFileError(f"{where} is no table, expected [[{KEYS}]]")
    if isinstance(fields.get("id"), str) and ID.fullmatch(fields["id"]):
        where = f"key '{fields['id']}'"
    _refuse_unknown(fields, FIELDS, where)
    for name in REQUIRED:
        if name not in fields:
            raise KeyFileError(f"{where}: '{name}' is missing")
    return ApiKey(
        id=_text(fields["id"], ID, f"{where}: 'id'", ID_FORM),
        digest=bytes.fromhex(_text(fields["hash"], HASH, f"{where}: 'hash'", HASH_FORM)[7:]),
        tenant=_text(fields["tenant"], NAME, f"{where}: 'tenant'", NAME_FORM),
        roles=frozenset(_roles(fields.get("roles", [Role.INFER]), f"{where}: 'roles'")),
        expires=_time(fields.get("expires"), f"{where}: 'expires'"),
        note=_text(fields.get("note", "-"), TEXT, f"{where}: 'note'", TEXT_FORM),
    )


def _text(value: Any, form: re.Pattern[str], where: str, expected: str) -> str:
    if isinstance(value, str) and form.fullmatch(value):
        return value
    raise KeyFileError(f"{where} is {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    return without_secrets(repr(value) if isinstance(value, str | list) else str(value))[:80]


def _roles(value: Any, where: str) -> Iterator[Role]:
    for each in _list(value, where):
        if each not in tuple(Role):
            raise KeyFileError(f"{where}: {_shown(each)} is no role, expected {', '.join(Role)}")
        yield Role(each)


def _list(value: Any, where: str) -> Sequence[Any]:
    if isinstance(value, list) and value:
        return value
    raise KeyFileError(f"{where} is {_shown(value)}, expected a list with at least one text")


def _time(value: Any, where: str) -> float:
    if value is None:
        return math.inf
    is_exact = isinstance(value, datetime) and value.tzinfo is not None
    if is_exact and FIRST_YEAR <= value.year <= LAST_YEAR:
        found: float = value.timestamp()
        return found
    raise KeyFileError(
        f"{where} is {_shown(value)}, expected a time as 2027-01-31T00:00:00Z, in the years "
        f"{FIRST_YEAR} to {LAST_YEAR}"
    )


def text_of_key(key: ApiKey) -> str:
    """The part of a key file for a key."""
    lines = [f"[[{KEYS}]]", f'id = "{key.id}"', f'hash = "sha256:{key.digest.hex()}"']
    lines.append(f"tenant = {json.dumps(key.tenant)}")
    lines.append(f"roles = {json.dumps(sorted(key.roles))}")
    if key.expires != math.inf:
        lines.append(f"expires = {datetime.fromtimestamp(key.expires, UTC):%Y-%m-%dT%H:%M:%SZ}")
    if key.note != "-":
        lines.append(f"note = {json.dumps(key.note, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def without_key(text: str, key_id: str) -> str:
    """The text without the lines of a key; comments after it stay.

    KeyFileError if the key is not there, or its lines cannot be found.
    """
    before = KeyReader().read(text)
    if key_id not in before.keys:
        raise KeyFileError(f"it has no key '{without_secrets(key_id)}'")
    left = {name: key for name, key in before.keys.items() if name != key_id}
    starts = [*(each.start() for each in BEGIN_OF_KEY.finditer(text)), len(text)]
    for start, end in pairwise(starts):
        if f'"{key_id}"' not in text[start:end]:
            continue
        ends = max(each.end() for each in LINE_OF_KEY.finditer(text, start, end))
        after = text[:start] + text[ends:].lstrip()
        with suppress(KeyFileError):
            if KeyReader().read(after).keys == left:
                return after
    raise KeyFileError(f"the lines of key '{key_id}' cannot be found: remove them by hand")


@contextmanager
def changing_key_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Hold the lock of a key file; the function replaces the file by a text, at once.

    A new file has the mode 0600, a replaced one keeps its own, and its owner.
    """
    target = path.resolve()
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(folder, target.parent)
        yield lambda text: replace_file(target, text)
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(folder: int, path: Path) -> None:
    ends = time.monotonic() + LOCK_SECS
    while time.monotonic() < ends:
        with suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.05)
    raise KeyFileError(f"another process locks its folder {path} for more than {LOCK_SECS:g} s")


def replace_file(path: Path, text: str) -> None:
    """Replace a file by a text, at once; a new file has the mode 0600."""
    before = path.stat() if path.exists() else None
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    written = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if before is not None:
                os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, NEW_MODE if before is None else stat.S_IMODE(before.st_mode))
            os.fsync(descriptor)
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
