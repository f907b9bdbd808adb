"""Mirrors of the repositories of a server, which share the bound of downloads."""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from gateway.storage.mirror.cache import RemoteCache
from gateway.storage.mirror.downloads import Transfers
from gateway.storage.mirror.errors import DownloadStopped, MirrorError
from gateway.storage.mirror.mirror import Mirror
from gateway.storage.mirror.settings import RemoteRepository
from gateway.storage.remote.addresses import AddressError
from gateway.storage.remote.clients import open_store
from gateway.storage.remote.credentials import CredentialError


def open_places(
    places: Iterable[Path | RemoteRepository], environment: Mapping[str, str]
) -> list[Path | Mirror]:
    """The places, with a mirror for each remote repository, after its first listing; blocks.

    The repositories are listed concurrently. Raises MirrorError.
    """
    transfers, found, stopped = Transfers(), list(places), threading.Event()

    def opened(place: Path | RemoteRepository) -> Path | Mirror:
        if isinstance(place, Path):
            return place
        try:
            mirror = _made(place, environment, transfers)
            mirror.open(stopped)
        except BaseException:
            stopped.set()  # no other one waits for its storage
            raise
        return mirror

    with ThreadPoolExecutor(max(1, len(found)), "opening") as threads:
        opening = [threads.submit(opened, each) for each in found]
        try:
            wait(opening)
        finally:
            stopped.set()
    errors = [error for each in opening if (error := each.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, DownloadStopped))
    return [each.result() for each in opening]


def _made(of: RemoteRepository, environment: Mapping[str, str], transfers: Transfers) -> Mirror:
    try:
        store = open_store(of.address, environment)
    except (AddressError, CredentialError) as error:
        raise MirrorError(str(error)) from None
    cache = RemoteCache(of.root, of.bound)
    return Mirror(store, cache, transfers, settle_secs=of.settle_secs, offline=of.offline)
