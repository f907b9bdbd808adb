"""Key files: TOML with `[[keys]]`, which are digests, `[[certificates]]` and `[tenants.NAME]`."""

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

from gateway.policy.certificates import KINDS, normal
from gateway.policy.keys import (
    NAME,
    NAME_FORM,
    PREFIX,
    ApiKey,
    KeyTable,
    ListedCertificate,
    Role,
)
from gateway.policy.tenants import MOST_TENANTS, OTHER, TenantRules, read_rules

KEYS, CERTIFICATES, TENANTS = TABLES = ("keys", "certificates", "tenants")
ID = re.compile(r"[A-Z2-7]{8}")
ID_FORM = "8 of A to Z and 2 to 7"
HASH = re.compile(r"sha256:([0-9a-f]{64})")
HASH_FORM = "sha256: and 64 hexadecimal digits"
TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,256}")
TEXT_FORM = "a text of 1 to 256 characters without control characters"
SAN = re.compile(rf"(?:{'|'.join(KINDS)}){TEXT.pattern}")
SAN_FORM = "URI:, DNS: or CN: and the name in the certificate, at most 256 characters"
OF_BOTH = ("tenant", "roles", "models", "expires", "note")
FIELDS = {KEYS: ("id", "hash", *OF_BOTH), CERTIFICATES: ("san", *OF_BOTH)}
REQUIRED = {KEYS: ("id", "hash", "tenant"), CERTIFICATES: ("san", "tenant")}
BEGIN_OF_TABLE = re.compile(
    rf"^[ \t]*\[(?:\[[ \t]*(?:{KEYS}|{CERTIFICATES})[ \t]*\]\]|[ \t]*{TENANTS}[ \t]*[.\]])", re.M
)
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


Listed = ApiKey | ListedCertificate


class _Found:
    """The tables of a text that were read."""

    def __init__(self) -> None:
        self.listed: dict[str, Listed] = {}
        self.tenants: dict[str, TenantRules] = {}

    def add_document(self, document: Mapping[str, Any]) -> None:
        """Read tables, and add them."""
        _refuse_unknown(document, TABLES, "the file")
        for kind, read in ((KEYS, _key), (CERTIFICATES, _certificate)):
            tables = document.get(kind, [])
            if not isinstance(tables, list):
                raise KeyFileError(f"'{kind}' is no list of tables, expected [[{kind}]]")
            for fields in tables:
                self.add(read(fields, f"{kind.removesuffix('s')} {len(self.listed) + 1}"))
        self._add_tenants(document.get(TENANTS, {}))

    def add(self, listed: Listed) -> None:
        """Add a key or a certificate."""
        name = _name_of(listed)
        if name in self.listed:
            kind = "key" if isinstance(listed, ApiKey) else "certificate"
            raise KeyFileError(f"{kind} '{without_secrets(name)}' is there twice")
        self.listed[name] = listed

    def _add_tenants(self, tables: Any) -> None:
        if not isinstance(tables, dict):
            raise KeyFileError(f"'{TENANTS}' is no table of tables, expected [{TENANTS}.NAME]")
        for name, members in tables.items():
            where = f"tenant '{without_secrets(name)[:80]}'"
            _text(name, NAME, where, NAME_FORM)
            if name == OTHER:
                raise KeyFileError(
                    f"{where} is the one of metrics without a table, expected another"
                )
            if name in self.tenants:
                raise KeyFileError(f"{where} is there twice")
            try:
                self.tenants[name] = read_rules(members)
            except ValueError as error:
                raise KeyFileError(f"{where}: {without_secrets(str(error))}") from None
        if len(self.tenants) > MOST_TENANTS:
            count = len(self.tenants)
            raise KeyFileError(f"{count} tables [{TENANTS}.NAME], expected at most {MOST_TENANTS}")


class KeyReader:
    """Reads the texts of a key file.

    Parts that were in the last text are not parsed again. Keys that are equal are the same, as are
    certificates.
    """

    def __init__(self) -> None:
        self._known: Mapping[bytes, Listed] = {}
        self._last: Mapping[str, Listed] = {}

    def read(self, text: str) -> KeyTable:
        """The table of a text; KeyFileError if a part of it is wrong."""
        found = _Found()
        try:
            known = dict(self._read_parts(text, found))
        except NO_TOML:
            # A part alone is no TOML. Either the whole is none, or a line within a text over
            # several lines looks like the beginning of a key.
            found, known = _Found(), {}
            found.add_document(_parsed(text))
        last, new = self._last, found.listed
        listed = {name: last[name] if last.get(name) == new[name] else new[name] for name in new}
        self._known = {mark: listed[_name_of(each)] for mark, each in known.items()}
        self._last = listed
        return KeyTable(
            (each for each in listed.values() if isinstance(each, ApiKey)),
            (each for each in listed.values() if isinstance(each, ListedCertificate)),
            found.tenants,
        )

    def _read_parts(self, text: str, found: _Found) -> Iterator[tuple[bytes, Listed]]:
        """Read the parts, which begin with a table each; yields those of one key or certificate."""
        starts = [0, *(each.start() for each in BEGIN_OF_TABLE.finditer(text)), len(text)]
        for start, end in pairwise(starts):
            part = text[start:end].strip()
            mark = blake2b(part.encode(), digest_size=16).digest()
            if listed := self._known.get(mark):
                found.add(listed)
            else:
                document, before = tomllib.loads(part), len(found.listed)
                found.add_document(document)
                if len(found.listed) == before + 1 and TENANTS not in document:
                    listed = next(reversed(found.listed.values()))
            if listed is not None:
                yield mark, listed


def _name_of(listed: Listed) -> str:
    """The id of a key, or the name of a certificate, which has a colon."""
    return listed.id if isinstance(listed, ApiKey) else listed.name


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
    if isinstance(fields, dict) and ID.fullmatch(str(fields.get("id"))):
        where = f"key '{fields['id']}'"
    _check_fields(fields, KEYS, where)
    return ApiKey(
        id=_text(fields["id"], ID, f"{where}: 'id'", ID_FORM),
        digest=bytes.fromhex(_text(fields["hash"], HASH, f"{where}: 'hash'", HASH_FORM)[7:]),
        **_of_both(fields, where),
    )


def _certificate(fields: Any, where: str) -> ListedCertificate:
    if isinstance(fields, dict) and SAN.fullmatch(str(fields.get("san"))):
        where = f"certificate '{without_secrets(str(fields['san']))}'"
    _check_fields(fields, CERTIFICATES, where)
    name = normal(_text(fields["san"], SAN, f"{where}: 'san'", SAN_FORM))
    return ListedCertificate(name=name, **_of_both(fields, where))


def _check_fields(fields: Any, kind: str, where: str) -> None:
    if not isinstance(fields, dict):
        raise KeyFileError(f"{where} is no table, expected [[{kind}]]")
    _refuse_unknown(fields, FIELDS[kind], where)
    for name in REQUIRED[kind]:
        if name not in fields:
            raise KeyFileError(f"{where}: '{name}' is missing")


def _of_both(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rights in the table of a key or a certificate."""
    roles = frozenset(_roles(fields.get("roles", [Role.INFER]), f"{where}: 'roles'"))
    globs = fields.get("models")
    models = [] if globs is None else _globs(globs, roles, f"{where}: 'models'")
    return {
        "tenant": _text(fields["tenant"], NAME, f"{where}: 'tenant'", NAME_FORM),
        "roles": roles,
        "models": tuple(models),
        "expires": _time(fields.get("expires"), f"{where}: 'expires'"),
        "note": _text(fields.get("note", "-"), TEXT, f"{where}: 'note'", TEXT_FORM),
    }


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


def _globs(value: Any, roles: frozenset[Role], where: str) -> Sequence[str]:
    if roles != {Role.INFER}:
        raise KeyFileError(
            f"{where} is for the role {Role.INFER} alone: the other roles have the whole server"
        )
    return [_text(each, TEXT, f"{where}: an element", TEXT_FORM) for each in _list(value, where)]


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
    if key.models:
        lines.append(f"models = {json.dumps(key.models, ensure_ascii=False)}")
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
    left = [each for each in before.listed() if each is not before.keys[key_id]]
    expected = (left, before.tenants)
    starts = [*(each.start() for each in BEGIN_OF_TABLE.finditer(text)), len(text)]
    for start, end in pairwise(starts):
        if f'"{key_id}"' not in text[start:end]:
            continue
        ends = max(each.end() for each in LINE_OF_KEY.finditer(text, start, end))
        after = text[:start] + text[ends:].lstrip()
        with suppress(KeyFileError):
            table = KeyReader().read(after)
            if (list(table.listed()), table.tenants) == expected:
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
