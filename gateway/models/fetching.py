"""Fetches of the files of a version in object storage, before it is loaded."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from gateway.errors import Code, InferenceError
from gateway.models.repository import LoadSource
from gateway.models.repository_agents import checksums, verify
from gateway.storage.mirror.downloads import Report
from gateway.storage.mirror.errors import MirrorError
from gateway.storage.mirror.mirror import RemoteFolder
from gateway.storage.mirror.trees import RemoteTree
from gateway.threads import apart

AT_ONCE = 8
"""Versions whose files are fetched at once; each has a thread that waits."""


class Fetches:
    """The fetches of a server, a few at once."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)

    @asynccontextmanager
    async def fetch(self, source: LoadSource, version: int) -> AsyncIterator[LoadSource]:
        """The source of a remote model with the files of one version on this machine.

        They are released if the block fails. Raises like `fetch`. If it is cancelled the download
        ends after its present parts.
        """
        stopped = threading.Event()
        try:
            async with self._places:
                tree = await apart(fetch, source, version, stopped, discard=RemoteTree.release)
        finally:
            stopped.set()
        try:
            yield replace(source, tree=tree)
        except BaseException:
            tree.release()
            raise


def fetch(
    source: LoadSource, version: int, stopped: threading.Event, report: Report | None = None
) -> RemoteTree:
    """The folder of a remote model, with one version; blocks.

    Checksums are verified, but for files of other versions. Raises InferenceError: UNAVAILABLE if
    files cannot be fetched, or once `stopped` is set.
    """
    remote = source.entry.files
    assert isinstance(remote, RemoteFolder)  # noqa: S101 - others have their files
    others = [str(each) for each in source.entry.available if each != version]
    try:
        tree = remote.fetch(others, stopped, report)
    except MirrorError as error:
        raise InferenceError(Code.UNAVAILABLE, str(error)) from None
    demanded = checksums(source.config)
    try:
        verify((each for each in demanded if each.file.partition("/")[0] not in others), tree.path)
    except BaseException:
        tree.release()
        raise
    return tree
