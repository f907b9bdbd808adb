"""API keys and certificates of a key file, which is read again after a change."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import time

from gateway.policy.caller import Caller
from gateway.policy.key_file import KeyReader, read_key_file
from gateway.policy.keys import ApiKey, KeyTable, ListedCertificate
from gateway.policy.tenants import Tenants
from gateway.policy.watched_file import LOOK_SECS, ReloadFailures, WatchedFile

log = logging.getLogger("sluice.server")


class ApiKeys:
    """The keys and certificates of a file, and its rules of tenants, which `tenants` gets.

    KeyFileError if it cannot be used at first, as in `WatchedFile`.
    """

    def __init__(self, path: Path, tenants: Tenants | None = None) -> None:
        reader = KeyReader()
        self._path = path
        self._tenants = tenants or Tenants()
        failures = ReloadFailures("key file refused", file=str(path))
        self._file = WatchedFile([path], lambda: reader.read(read_key_file(path)), failures)
        self._take()

    @property
    def failures(self) -> ReloadFailures:
        """The failures of reading the file again."""
        return self._file.failures

    @property
    def counts(self) -> Mapping[str, int]:
        """The numbers of keys, certificates and tenants with rules, as fields of a log line."""
        found = self._file.value
        counts = {"keys": len(found.keys), "certificates": len(found.certificates)}
        return counts | ({"tenants": len(found.tenants)} if found.tenants else {})

    def find(self, given: bytes, now: float) -> Caller | None:
        """The caller with a key of the file; the time is that of a wrong key."""
        found = self._file.value.find(given, now)
        return None if found is None else found.caller

    def find_certificate(self, name: str) -> ListedCertificate | None:
        """The entry of the certificates with a name, also one that has expired."""
        return self._file.value.certificates.get(name)

    async def follow(self, on_invalid: Callable[[], None]) -> None:
        """Read the file again within LOOK_SECS and the time of reading, whenever it changes.

        `on_invalid` is called when callers are no longer valid.
        """
        looked, compared = time(), self._file.value
        while True:
            await asyncio.sleep(LOOK_SECS)
            now = time()
            try:
                if await self._file.look():
                    self._take()
                table = self._file.value
                invalid = await asyncio.to_thread(_invalid, compared, table, looked, now)
            except Exception as error:  # noqa: BLE001 - the next round tries again
                self.failures.note(error)
                continue
            looked, compared = now, table
            for each in invalid:
                each.caller.valid = False
            if invalid:
                on_invalid()

    def _take(self) -> None:
        self._tenants.replace(self._file.value.tenants)
        log.info("key file read", extra={"file": str(self._path), **self.counts})


def _invalid(
    before: KeyTable, after: KeyTable, since: float, until: float
) -> Sequence[ApiKey | ListedCertificate]:
    """Those that the next table does not have as they were, and those that expired meanwhile."""
    found = [each for each in before.expiring if since < each.expires <= until]
    if before is not after:
        kept = {id(each) for each in after.listed()}
        found += [each for each in before.listed() if id(each) not in kept]
    return found
