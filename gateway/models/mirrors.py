"""The remote repositories of a server: their listings, downloads and values."""

import asyncio
import logging
from collections.abc import Mapping

from gateway.errors import Code, InferenceError
from gateway.models.homes import RemoteHome
from gateway.observability.remote_metrics import RemoteReading
from gateway.storage.mirror.errors import MirrorError, ModelUploading
from gateway.threads import apart

SETTLE_LISTINGS = 3
"""Listings at the start of a remote repository that is changing."""

log = logging.getLogger("sluice.repository")


class RemoteRepositories:
    """The mirrors among the homes of models, each with the name of its only model, if it has one.

    Methods block, but for `settle`.
    """

    def __init__(self, homes: Mapping[RemoteHome, str | None]) -> None:
        self._homes = homes

    def __bool__(self) -> bool:
        return bool(self._homes)

    def poll(self) -> None:
        """List each repository once; one that cannot be listed keeps its models."""
        for home in self._homes:
            self._poll(home)

    def poll_unreachable(self) -> None:
        """List again the repositories whose last listing has failed."""
        for home in self._homes:
            if not home.mirror.up:
                self._poll(home)

    def refresh(self, name: str) -> str:
        """List one model in each repository, and show it as it is now.

        Returns the error of a repository that cannot be listed and does not know the model, "" if
        there is none. Raises UNAVAILABLE if the model is being uploaded.
        """
        errors = []
        for home, only in self._homes.items():
            if only is None or only == name:
                try:
                    home.mirror.refresh(name if only is None else "")
                except ModelUploading as error:
                    raise InferenceError(Code.UNAVAILABLE, str(error)) from None
                except MirrorError as error:
                    errors.append(str(error))
        return next(iter(errors), "")

    async def settle(self) -> None:
        """Wait for changes that may be complete soon, for a few listings."""
        for _ in range(SETTLE_LISTINGS):
            mirrors = (home.mirror for home in self._homes)
            if secs := max((m.settle_secs for m in mirrors if m.is_settling), default=0.0):
                await asyncio.sleep(secs)
                await apart(self.poll)

    def downloading(self, name: str) -> str:
        """The progress of the download of a model, "" if there is none."""
        for home, only in self._homes.items():
            if progress := home.mirror.progress(name if only is None else ""):
                return f"downloading {progress}"
        return ""

    def reading(self) -> RemoteReading | None:
        """The values of all mirrors; None if there are none."""
        mirrors = [home.mirror for home in self._homes]
        if not mirrors:
            return None
        return RemoteReading(
            up={each.address: each.up for each in mirrors},
            byte_count=mirrors[0].transfers.bytes,
            requests=mirrors[0].transfers.requests,
            cache_bytes=sum({each.cache.root: each.cache.byte_size for each in mirrors}.values()),
            cache_hits=sum(each.cache_hits for each in mirrors),
            downloads=sum(each.downloads for each in mirrors),
            download_secs=sum(each.download_secs for each in mirrors),
        )

    def _poll(self, home: RemoteHome) -> None:
        was_up = home.mirror.up
        try:
            home.mirror.poll()
        except MirrorError as error:
            if was_up:
                extra = {"address": home.mirror.address, "reason": str(error)}
                log.error("remote repository not listed, its models stay", extra=extra)
