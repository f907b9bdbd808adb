"""Credentials of requests: API keys, and what their roles may do in each area."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from time import time
from typing import NamedTuple

from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.key_file import KeyFileError, KeyReader, read_key_file
from gateway.policy.keys import ApiKey, KeyTable, Role

AUTHORIZATION = b"authorization"
NAMES = frozenset({AUTHORIZATION, b"x-api-key", b"api-key"})
"""Headers with a key."""
METADATA = frozenset(each.decode() for each in NAMES)
"""The same as metadata of gRPC."""
EXPECTED = "expected 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
LOOK_SECS = 1.0
"""The interval of looking for a changed key file."""

MAY_READ: Mapping[Area, frozenset[Role]] = {
    Area.METADATA: frozenset(Role),
    Area.INFERENCE: frozenset({Role.INFER}),
    Area.MODEL_CONFIG: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.MODEL_REPOSITORY: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.SHARED_MEMORY: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.STATISTICS: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.TRACE: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.LOGGING: frozenset({Role.OBSERVE, Role.ADMIN}),
    Area.METRICS: frozenset({Role.OBSERVE, Role.ADMIN}),
}
"""The roles for requests that change nothing; the other areas need no key."""
MAY_CHANGE = frozenset({Role.ADMIN})

log = logging.getLogger("sluice.server")


class Reason(Enum):
    """The fault of a refused request; the value is the label of the metric."""

    MALFORMED = "malformed"
    MISSING = "missing"
    WRONG = "wrong"
    FORBIDDEN = "forbidden"


class KeyRefusal(NamedTuple):
    """The refusal of a request, with the text for its client."""

    reason: Reason
    message: str


class Credentials:
    """The keys of a file, which is read again after a change.

    KeyFileError if it cannot be used at first; later one that cannot be used changes nothing.
    `refusals` counts by wire and reason.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = KeyReader()
        self._seen = _state_of(path)
        self._table = self._reader.read(read_key_file(path))
        self.refusals: Counter[tuple[str, Reason]] = Counter()
        self.reload_failures = 0
        self._failure = ""

    @property
    def count(self) -> int:
        """The number of keys."""
        return len(self._table.keys)

    def check(
        self, given: Sequence[tuple[bytes, bytes]], roles: frozenset[Role]
    ) -> Caller | KeyRefusal:
        """The caller of a request with these headers of NAMES, if its key has one of the roles."""
        return _check(given, roles, self._table)

    def note(self, wire: str, refusal: KeyRefusal) -> None:
        """Count a refused request of a wire."""
        self.refusals[wire, refusal.reason] += 1

    async def follow(self, on_invalid: Callable[[], None]) -> None:
        """Read the file again within LOOK_SECS and the time of reading, whenever it changes.

        `on_invalid` is called when callers are no longer valid.
        """
        looked, compared = time(), self._table
        while True:
            await asyncio.sleep(LOOK_SECS)
            now = time()
            try:
                await self._look()
                invalid = await asyncio.to_thread(_invalid, compared, self._table, looked, now)
            except Exception as error:  # noqa: BLE001 - the next round tries again
                self._note_failure(error)
                continue
            looked, compared = now, self._table
            for key in invalid:
                key.caller.valid = False
            if invalid:
                on_invalid()

    async def _look(self) -> None:
        """Read the file if it has changed; one that cannot be used leaves the keys as they are."""
        seen = await asyncio.to_thread(_state_of, self._path)
        if seen == self._seen:
            return
        try:
            self._table = await asyncio.to_thread(self._read)
        except KeyFileError as error:
            self._note_failure(error)
            if not error.passes:
                self._seen = seen
            return
        self._seen, self._failure = seen, ""
        log.info("key file read", extra={"file": str(self._path), "keys": self.count})

    def _note_failure(self, error: Exception) -> None:
        """Count and log a failure, unless it is that of the last second."""
        reason = str(error) if isinstance(error, KeyFileError) else repr(error)
        if reason != self._failure:
            self._failure = reason
            self.reload_failures += 1
            log.error("key file refused", extra={"file": str(self._path), "reason": reason})

    def _read(self) -> KeyTable:
        return self._reader.read(read_key_file(self._path))


def _invalid(before: KeyTable, after: KeyTable, since: float, until: float) -> Sequence[ApiKey]:
    """The keys that the next table does not have as they were, and those that expired meanwhile."""
    found = [each for each in before.expiring if since < each.expires <= until]
    if before is not after:
        kept = after.keys
        found += [key for name, key in before.keys.items() if kept.get(name) is not key]
    return found


def _check(
    given: Sequence[tuple[bytes, bytes]], roles: frozenset[Role], table: KeyTable
) -> Caller | KeyRefusal:
    if sum(name == AUTHORIZATION for name, _ in given) > 1:
        return KeyRefusal(
            Reason.MALFORMED, f"the request has two headers Authorization, {EXPECTED}"
        )
    keys = {key for name, value in given if (key := _key_in(name, value)) is not None}
    if not keys:
        return KeyRefusal(Reason.MISSING, f"the API key is missing, {EXPECTED}")
    if len(keys) > 1:
        return KeyRefusal(Reason.MALFORMED, f"the request has two different API keys, {EXPECTED}")
    found = table.find(keys.pop(), time())
    if found is None:
        return KeyRefusal(Reason.WRONG, "the API key is not valid")
    if roles.isdisjoint(found.roles):
        has, expected = (_listed(each) for each in (found.roles, roles))
        return KeyRefusal(
            Reason.FORBIDDEN, f"the API key '{found.id}' has the role {has}, expected {expected}"
        )
    return found.caller


def _key_in(name: bytes, value: bytes) -> bytes | None:
    """The key in a header; None for an Authorization of another scheme."""
    if name != AUTHORIZATION:
        return value.strip()
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(each for each in Role if each in roles)


def _state_of(path: Path) -> tuple[int, ...]:
    """The state of a file that differs once its content, or the file behind a link, does."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
