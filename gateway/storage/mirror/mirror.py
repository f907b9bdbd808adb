"""The mirror of one remote repository: its models by the last good listing, and their folders."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from gateway.storage.mirror.blobs import Blob
from gateway.storage.mirror.cache import RemoteCache
from gateway.storage.mirror.contents import (
    CONFIG_FILE,
    NS,
    RemoteFiles,
    RemoteModels,
    follow,
    models_of,
)
from gateway.storage.mirror.downloads import (
    Download,
    DownloadProgress,
    RemoteStore,
    Report,
    Transfers,
)
from gateway.storage.mirror.errors import MirrorError
from gateway.storage.mirror.saved_listing import SavedListing
from gateway.storage.mirror.trees import Manifest, RemoteTree
from gateway.storage.remote.objects import ObjectChanged, RemoteError, RemoteListing, RemoteObject

log = logging.getLogger("sluice.remote")

ATTEMPTS = 4
"""Downloads of a model whose objects change meanwhile."""
CONFIGS = "configs"
LOG_SECS = 10.0

_Terms = tuple[threading.Event, Report]
"""The end of a download by its load, and its reports."""


class Mirror:
    """A remote repository on the local disk. Methods block, and are safe in concurrent threads.

    Paths are relative to the repository, "" is itself. Only `open`, `poll`, `refresh` and downloads
    ask the storage; none does with `offline`. A changed or missing model counts as `follow` says,
    the newest object of a change being `settle_secs` old.
    """

    def __init__(
        self,
        store: RemoteStore,
        cache: RemoteCache,
        transfers: Transfers,
        *,
        settle_secs: float = 5.0,
        offline: bool = False,
    ) -> None:
        self.address = store.origin
        self.up = not offline
        self.cache_hits = 0
        self.downloads = 0
        self.download_secs = 0.0
        self._store = store
        self.cache = cache
        self.transfers = transfers
        self.settle_secs = settle_secs
        self._offline = offline
        self._id = blake2b(store.origin.encode(), digest_size=16).hexdigest()
        self._saved = SavedListing(cache.root / "trees" / self._id, self.address, cache.blobs)
        self._changing = threading.Lock()
        self._fetching: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._progress: dict[str, DownloadProgress] = {}
        self._before: RemoteModels = {}
        self._models: RemoteModels = {}
        self._files = RemoteFiles({})

    # Listings.

    def open(self) -> None:
        """Read the first listing; a storage that is down is replaced by what the cache has.

        A model that is being uploaded is served as it was before. Raises MirrorError if there is no
        listing at all.
        """
        self.cache.measure()
        known = self._saved.cached()
        if self._offline:
            if known is None:
                raise MirrorError(f"'{self.address}' is not in the cache (--remote-offline)")
            self._show(known)
            return
        try:
            listing = self._list("")
        except MirrorError as error:
            if known is None:
                raise
            about = {"address": self.address, "reason": str(error), "models": len(known)}
            log.error("remote repository unreachable, cached models served", extra=about)
            self._show(known)
            return
        now = self._models_of(listing)
        if known and not now:
            self._log_emptied()
            self._show(known)
        else:
            self._follow(known or {}, now, now, _now_ns(listing))

    def poll(self) -> None:
        """List the repository once; MirrorError if that fails, and nothing changes then."""
        if self._offline:
            return
        listing = self._list("")
        with self._changing:
            now = self._models_of(listing)
            if self._models and not now:
                self._log_emptied()
            else:
                self._follow(self._models, self._before, now, _now_ns(listing))

    def refresh(self, folder: str) -> None:
        """List one model now, and serve it as it is; if that fails, as it was.

        MirrorError if it is being uploaded, or unknown and not listed.
        """
        if self._offline:
            return
        unit = "" if "" in self._models else folder
        try:
            now = self._models_of(self._list(unit))
        except MirrorError as error:
            if unit not in self._models:
                raise
            log.warning("model not listed", extra={"model": folder, "reason": str(error)})
            return
        if any(each.is_uploading for each in now.values()):
            raise MirrorError(f"model '{folder}' is being uploaded: it has a file .uploading")
        listed = next(iter(now.values()), None)
        found = {} if listed is None else {unit: listed}
        with self._changing:
            others = {name: each for name, each in self._models.items() if name != unit}
            self._before = {**self._before, **found}
            self._serve(others | found)

    @property
    def is_settling(self) -> bool:
        """Whether the last listing has a change that may count after the next one."""
        return any(
            not each.is_uploading
            and (name not in self._models or self._models[name].identity != each.identity)
            for name, each in self._before.items()
        )

    def _follow(
        self, accepted: RemoteModels, before: RemoteModels, now: RemoteModels, now_ns: int
    ) -> None:
        self._before = now
        self._serve(follow(accepted, before, now, lambda m: m.is_settled(now_ns, self.settle_secs)))

    def _list(self, under: str) -> RemoteListing:
        self.transfers.count()
        try:
            listing = self._store.list(under)
        except RemoteError as error:
            self.up = False
            raise MirrorError(str(error)) from None
        self.up = True
        return listing

    def _models_of(self, listing: RemoteListing) -> RemoteModels:
        models, refused = models_of(listing)
        for key in refused:
            log.warning("object ignored: its key is no path", extra={"key": ascii(key)})
        return models

    def _log_emptied(self) -> None:
        log.error("remote repository is empty, its models stay", extra={"address": self.address})

    # Models.

    @property
    def files(self) -> RemoteFiles:
        """The folders and files of the models that are served now."""
        return self._files

    def read(self, path: str) -> bytes:
        """The content of a file, downloaded if it is missing; b"" if there is none."""
        for _ in range(ATTEMPTS):
            if (found := self._files.file(path)) is None:
                return b""
            blob = Blob.of(self.address, found)
            try:
                self._download([blob], f"'{path}'", threading.Event(), _nothing)
                return self.cache.blobs.path(blob.key).read_bytes()
            except FileNotFoundError:
                continue
            except ObjectChanged as error:
                raise MirrorError(str(error)) from None
        raise MirrorError(f"'{path}' is evicted at once")

    def folder(self, path: str) -> "RemoteFolder":
        """A folder as it is now."""
        return RemoteFolder(self, path, self._files)

    def progress(self, folder: str) -> DownloadProgress | None:
        """The download of a model that is under way."""
        return self._progress.get(folder)

    def fetch(
        self, of: "RemoteFolder", without: Sequence[str], stopped: threading.Event, report: Report
    ) -> RemoteTree:
        """As `RemoteFolder.fetch`."""

        def note(progress: DownloadProgress) -> None:
            self._progress[of.path] = progress
            report(progress)

        files, last = of.files, ""
        with self._fetching[of.path]:
            try:
                for _ in range(ATTEMPTS):
                    try:
                        return self._fetched(replace(of, files=files), without, (stopped, note))
                    except FileNotFoundError:
                        last = f"model '{of.path}': its cached files are evicted at once"
                    except ObjectChanged as error:
                        last, files = str(error), self._listed_again(of)
                raise MirrorError(last)
            finally:
                self._progress.pop(of.path, None)

    def _fetched(self, of: "RemoteFolder", without: Sequence[str], terms: _Terms) -> RemoteTree:
        found = list(of.files.files(of.path, without))
        blobs = {path: Blob.of(self.address, each) for path, each in found if each is not None}
        manifest = Manifest(
            address=f"{self.address}/{of.path}" if of.path else self.address,
            files={path: each.key for path, each in blobs.items()},
            sizes={each.key: each.object.size for each in blobs.values()},
            folders=tuple(sorted(path for path, each in found if each is None)),
        )
        tree = self.cache.hold(self._id, of.path, manifest)
        try:
            if not tree.path.is_dir():
                self._download(list(blobs.values()), f"model '{of.path}'", *terms)
                self.cache.build(tree, manifest)
        except BaseException:
            tree.release()
            raise
        return tree

    def _download(
        self, wanted: Sequence[Blob], what: str, stopped: threading.Event, report: Report
    ) -> None:
        missing = [each for each in wanted if not self.cache.blobs.has(each.key)]
        self.cache_hits += len(wanted) - len(missing)
        if not missing:
            return
        if self._offline:
            raise MirrorError(f"{what} is not whole in the cache (--remote-offline)")
        self.cache.make_room(sum(each.object.size for each in missing), what)
        began = time.monotonic()
        download = Download(self._store, self.cache.blobs, self.transfers, stopped)
        try:
            download.run(wanted, report)
        except ObjectChanged:
            raise
        except RemoteError as error:
            raise MirrorError(str(error)) from None
        self.cache.measure()
        self.downloads += 1
        self.download_secs += time.monotonic() - began

    def _listed_again(self, of: "RemoteFolder") -> RemoteFiles:
        """The files of a model as they are now; MirrorError if its configuration has changed."""
        found = RemoteFiles(self._models_of(self._list(of.path)))
        if _configs(found, of.path) != _configs(of.files, of.path):
            raise MirrorError(f"model '{of.path}' changed during its download: load it again")
        return found

    def _show(self, models: RemoteModels) -> None:
        self._models, self._files = models, RemoteFiles(models)

    def _serve(self, models: RemoteModels) -> None:
        """Show the models, and save them for a start without the storage."""
        if models != self._models:
            self._show(models)
            self._saved.write(models)


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder of a mirror, with the files of one listing; paths are relative to the repository."""

    mirror: Mirror
    path: str
    files: RemoteFiles

    def fetch(
        self,
        without: Iterable[str] = (),
        stopped: threading.Event | None = None,
        report: Report | None = None,
    ) -> RemoteTree:
        """The folder on disk, without some subfolders; objects that are missing are downloaded.

        `report` is called while it lasts. Objects that change meanwhile are listed again. Raises
        MirrorError; DownloadStopped once `stopped` is set.
        """
        shown = report or _LoggedProgress(self.path)
        return self.mirror.fetch(self, tuple(without), stopped or threading.Event(), shown)


class _LoggedProgress:
    """A log line about a download every 10 s."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._next_at = time.monotonic() + LOG_SECS

    def __call__(self, progress: DownloadProgress) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at += LOG_SECS
            extra = {"model": self._model, "progress": str(progress)}
            log.info("model downloading", extra=extra)


def _nothing(_: DownloadProgress) -> None:
    """No report."""


def _now_ns(listing: RemoteListing) -> int:
    return time.time_ns() if listing.at is None else int(listing.at.timestamp()) * NS


def _configs(files: RemoteFiles, folder: str) -> list[RemoteObject | None]:
    start = f"{folder}/" if folder else ""
    named = [path for path, _ in files.files(f"{start}{CONFIGS}")]
    paths = (CONFIG_FILE, *(f"{CONFIGS}/{each}" for each in sorted(named)))
    return [files.file(f"{start}{each}") for each in paths]
