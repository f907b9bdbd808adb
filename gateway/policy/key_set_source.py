"""Sources of a key set: a file, which is read again after a change, or a URL."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from gateway.policy.key_file import KeyFileError, read_key_file, replace_file
from gateway.policy.key_set import MAX_SET_BYTES, KeySet, read_key_set
from gateway.policy.key_set_fetch import fetch
from gateway.policy.key_set_url import KeySetUrl
from gateway.policy.watched_file import LOOK_SECS, ReloadFailures, WatchedFile

REFRESH_SECS = 300.0
"""The interval of fetches."""
UNKNOWN_SECS = 30.0
"""The least time between a fetch and one for a token with an unknown key."""
KIND = "key set"
FOLDER_MODE = 0o700

OnChange = Callable[[], Awaitable[None]]

log = logging.getLogger("sluice.server")


class KeySetSource(Protocol):
    """The present key set, and the failures of reading it again."""

    @property
    def keys(self) -> KeySet:
        """The last set that could be used."""

    @property
    def failures(self) -> ReloadFailures:
        """The failures since the start."""

    async def follow(self, on_change: OnChange) -> None:
        """Read the set again and again; `on_change` is called after a change."""

    def note_unknown(self) -> None:
        """Note that a token names a key that the set does not have."""


async def key_set_source(place: Path | KeySetUrl, folder: Path) -> KeySetSource:
    """The source at a place; a set behind a URL is stored in the folder.

    KeyFileError if its set cannot be used.
    """
    if isinstance(place, Path):
        return KeySetFile(place)
    found = KeySetUrlSource(place, folder)
    await found.load()
    return found


class KeySetFile:
    """The key set of a file; KeyFileError if it cannot be used at first, as in `WatchedFile`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        failures = ReloadFailures(f"{KIND} refused", file=str(path))
        self._file = WatchedFile([path], partial(_read, path), failures)
        _log_read(str(path), self.keys)

    @property
    def keys(self) -> KeySet:
        """The set of the last content that could be used."""
        return self._file.value

    @property
    def failures(self) -> ReloadFailures:
        """The failures of reading the file again."""
        return self._file.failures

    async def follow(self, on_change: OnChange) -> None:
        """Read the file again within LOOK_SECS and the time of reading, whenever it changes."""
        while True:
            await asyncio.sleep(LOOK_SECS)
            try:
                if await self._file.look():
                    _log_read(str(self._path), self.keys)
                    await on_change()
            except Exception as error:  # noqa: BLE001 - the next round tries again
                self.failures.note(error)

    def note_unknown(self) -> None:
        """Do nothing: a change of the file is noticed anyway."""


class KeySetUrlSource:
    """The key set behind a URL, which is fetched again and again.

    `load` gets the first one. The last one that could be used is stored in a folder of this user: a
    server that starts without the issuer uses it.
    """

    def __init__(self, url: KeySetUrl, folder: Path) -> None:
        self._url = url
        name = sha256(f"{url.is_secure} {url.authority}{url.target}".encode()).hexdigest()
        self._stored = folder / f"{name[:32]}.json"
        self._text = ""
        self._unknown = asyncio.Event()
        self.keys = KeySet()
        self.failures = ReloadFailures(f"{KIND} refused", source=str(url))

    async def load(self) -> None:
        """Fetch the set, or else use the stored one; KeyFileError if neither can be used."""
        try:
            await self._refresh()
            return
        except KeyFileError as error:
            failure = error
        with suppress(KeyFileError):
            self.keys = await asyncio.to_thread(_read_stored, self._stored)
            log.warning("stored key set used", extra={"source": str(self._url)})
        if not self.keys.keys:
            raise failure
        self.failures.note(failure)

    async def follow(self, on_change: OnChange) -> None:
        """Fetch the set each REFRESH_SECS, and for an unknown key after UNKNOWN_SECS.

        A set that cannot be fetched or used leaves the keys as they are.
        """
        while True:
            await self._due()
            try:
                if await self._refresh():
                    await on_change()
                self.failures.clear()
            except Exception as error:  # noqa: BLE001 - the next round tries again
                self.failures.note(error)

    def note_unknown(self) -> None:
        """Fetch the set at the next time that is allowed."""
        self._unknown.set()

    async def _due(self) -> None:
        """Wait until the next fetch is due."""
        await asyncio.sleep(UNKNOWN_SECS)
        with suppress(TimeoutError):
            async with asyncio.timeout(REFRESH_SECS - UNKNOWN_SECS):
                await self._unknown.wait()
        self._unknown.clear()

    async def _refresh(self) -> bool:
        """Fetch the set and store it; whether it has changed."""
        text = await fetch(self._url)
        if text == self._text:
            return False
        self.keys = await asyncio.to_thread(read_key_set, text)
        self._text = text
        _log_read(str(self._url), self.keys)
        try:
            await asyncio.to_thread(_store, self._stored, text)
        except OSError as error:
            log.warning("key set not stored", extra={"reason": error.strerror})
        return True


def _read(path: Path) -> KeySet:
    return read_key_set(read_key_file(path, public=True, most_bytes=MAX_SET_BYTES))


def _read_stored(path: Path) -> KeySet:
    return read_key_set(read_key_file(path, most_bytes=MAX_SET_BYTES))


def _store(path: Path, text: str) -> None:
    path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    replace_file(path, text)


def _log_read(source: str, keys: KeySet) -> None:
    log.info("key set read", extra={"source": source, "keys": len(keys.keys)})
