"""The mirror of one remote repository: its models by the last good listing, and their folders."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
    is_one_model,
    models_of,
)
from gateway.storage.mirror.downloads import (
    Download,
    DownloadProgress,
    RemoteStore,
    Report,
    Transfers,
    rarely,
)
from gateway.storage.mirror.errors import MirrorError, ModelUploading
from gateway.storage.mirror.saved_listing import SavedListing
from gateway.storage.mirror.trees import Manifest, RemoteTree
from gateway.storage.remote.objects import (
    FIRST,
    ObjectChanged,
    Patience,
    RemoteError,
    RemoteListing,
    RemoteObject,
)

log = logging.getLogger("sluice.remote")

ATTEMPTS = 4
"""Downloads of a model whose objects change meanwhile."""
CONFIGS = "configs"

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
        self._is_one_model = False
        self._before: RemoteModels = {}
        self._models: RemoteModels = {}
        self._files = RemoteFiles({})

    # Listings.

    def open(self, stopped: threading.Event | None = None) -> None:
        """Read the first listing; a storage that is down is replaced by what the cache has.

        The storage has less time for its answer if the cache has models; if not, an overloaded one
        is waited for until `stopped`. The listing decides whether the repository is the folder of
        one model. A model that is being uploaded is served as it was before. Raises MirrorError if
        there is no listing at all.
        """
        self.cache.measure()
        known = self._saved.cached()
        if self._offline:
            if known is None:
                raise MirrorError(f"'{self.address}' is not in the cache (--remote-offline)")
            self._show_cached(known)
            return
        try:
            listing = self._list("", FIRST) if known else self._list_at_last(stopped)
        except MirrorError as error:
            if known is None:
                raise
            about = {"address": self.address, "reason": str(error), "models": len(known)}
            log.error("remote repository unreachable, cached models served", extra=about)
            self._show_cached(known)
            return
        self._is_one_model = is_one_model(listing) if listing.objects else "" in (known or {})
        now = self._models_of(listing)
        self._follow(known or {}, now, now, _now_ns(listing))

    def poll(self) -> None:
        """List the repository once; MirrorError if that fails, and nothing changes then."""
        if self._offline:
            return
        listing = self._list("")
        with self._changing:
            now = self._models_of(listing)
            self._follow(self._models, self._before, now, _now_ns(listing))

    def refresh(self, folder: str) -> None:
        """List one model now, and serve it as it is; if that fails, as it was.

        MirrorError if it is being uploaded, or unknown and not listed.
        """
        if self._offline:
            return
        unit = "" if self._is_one_model else folder
        try:
            now = self._models_of(self._list(unit))
        except MirrorError as error:
            if unit not in self._models:
                raise
            log.warning("model not listed", extra={"model": folder, "reason": str(error)})
            return
        if any(each.is_uploading for each in now.values()):
            raise ModelUploading(folder)
        with self._changing:
            others = {name: each for name, each in self._models.items() if name != unit}
            self._before = {**self._before, **now}
            self._serve({**others, **now})

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
        """Serve the models after a listing; those before it if none would be left."""
        found = follow(accepted, before, now, lambda m: m.is_settled(now_ns, self.settle_secs))
        if accepted and not found:
            about = {"address": self.address}
            log.error("remote repository is empty, its models stay", extra=about)
            found = accepted
        self._before = now
        self._serve(found)

    def _list(self, under: str, patience: Patience | None = None) -> RemoteListing:
        return self._listed(lambda: self._store.list(under, patience))

    def _list_at_last(self, stopped: threading.Event | None) -> RemoteListing:
        """List the repository; while the storage is overloaded again and again, as parts are."""

        def ask() -> RemoteListing:
            try:
                return self._store.list()
            except RemoteError as error:
                if error.is_slow_down:
                    about = {"address": self.address, "reason": str(error)}
                    log.warning("remote repository overloaded, listed again", extra=about)
                raise

        ended = stopped or threading.Event()
        return self._listed(lambda: self.transfers.copy(ask, 0, ended))

    def _listed(self, ask: Callable[[], RemoteListing]) -> RemoteListing:
        self.transfers.count()
        try:
            listing = ask()
        except RemoteError as error:
            self.up = False
            raise MirrorError(str(error)) from None
        self.up = True
        return listing

    def _models_of(self, listing: RemoteListing) -> RemoteModels:
        models, refused = models_of(listing, one=self._is_one_model)
        if refused:
            about = {"address": self.address, "first": ascii(refused[0]), "count": len(refused)}
            log.warning("objects ignored, their keys are no paths of files", extra=about)
        return models

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
                if self._lacks([blob], f"'{path}'"):
                    self.cache.make_room({blob.key: found.size}, f"'{path}'")
                self._download([blob], threading.Event(), _nothing)
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
        if (whole := self.cache.hold_whole(self._id, of.path, manifest)) is not None:
            return whole
        wanted, what = list(blobs.values()), f"model '{of.path}'"
        self._lacks(wanted, what)
        tree = self.cache.hold_new(self._id, of.path, manifest, what)
        try:
            self._download(wanted, *terms)
            self.cache.build(tree, manifest)
        except BaseException:
            tree.release()
            raise
        return tree

    def _lacks(self, wanted: Sequence[Blob], what: str) -> bool:
        """Whether blobs are to be downloaded; MirrorError if the storage must not be asked."""
        lacks = not all(self.cache.blobs.has(each.key) for each in wanted)
        if lacks and self._offline:
            raise MirrorError(f"{what} is not whole in the cache (--remote-offline)")
        return lacks

    def _download(self, wanted: Sequence[Blob], stopped: threading.Event, report: Report) -> None:
        missing = [each for each in wanted if not self.cache.blobs.has(each.key)]
        self.cache_hits += len(wanted) - len(missing)
        if not missing:
            return
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
        """The files of a model as they are now.

        MirrorError if it is gone, being uploaded or not settled, or if its configuration has
        changed.
        """
        listing = self._list(of.path)
        models = self._models_of(listing)
        if not models:
            raise MirrorError(f"model '{of.path}' was deleted during its download")
        now_ns, found = _now_ns(listing), RemoteFiles(models)
        for model in models.values():
            if model.is_uploading:
                raise ModelUploading(of.path)
            if not model.is_settled(now_ns, self.settle_secs) or (
                _configs(found, of.path) != _configs(of.files, of.path)
            ):
                raise MirrorError(f"model '{of.path}' changed during its download: load it again")
        return found

    def _show_cached(self, known: RemoteModels) -> None:
        self._is_one_model = "" in known
        self._show(known)

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
        shown = report or rarely(self._log)
        return self.mirror.fetch(self, tuple(without), stopped or threading.Event(), shown)

    def _log(self, progress: DownloadProgress) -> None:
        log.info("model downloading", extra={"model": self.path, "progress": str(progress)})


def _nothing(_: DownloadProgress) -> None:
    """No report."""


def _now_ns(listing: RemoteListing) -> int:
    return time.time_ns() if listing.at is None else int(listing.at.timestamp()) * NS


def _configs(files: RemoteFiles, folder: str) -> list[RemoteObject | None]:
    start = f"{folder}/" if folder else ""
    named = [path for path, _ in files.files(f"{start}{CONFIGS}")]
    paths = (CONFIG_FILE, *(f"{CONFIGS}/{each}" for each in sorted(named)))
    return [files.file(f"{start}{each}") for each in paths]
