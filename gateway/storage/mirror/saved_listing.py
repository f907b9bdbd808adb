"""The last good listing of a repository on disk, for a start without the storage."""

import json
import logging
import secrets
from collections.abc import Iterable
from pathlib import Path

from gateway.storage.mirror.blobs import Blob, Blobs
from gateway.storage.mirror.contents import RemoteModel, RemoteModels
from gateway.storage.remote.objects import RemoteObject

log = logging.getLogger("sluice.remote")


class SavedListing:
    """The file of the models that were served last."""

    def __init__(self, folder: Path, address: str, blobs: Blobs) -> None:
        self._path = folder / "listing.json"
        self._address = address
        self._blobs = blobs

    def write(self, models: RemoteModels) -> None:
        """Replace the models; a cache that is only read keeps the old ones."""
        found = {
            name: {
                "objects": [[o.key, o.etag, o.size, o.modified_ns] for o in model.objects],
                "folders": model.folders,
            }
            for name, model in models.items()
        }
        staging = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            staging.parent.mkdir(parents=True, exist_ok=True)
            staging.write_text(json.dumps({"address": self._address, "models": found}))
            staging.rename(self._path)
        except OSError as error:
            log.warning("listing not saved", extra={"reason": error.strerror})

    def cached(self) -> RemoteModels | None:
        """The models and versions of which the cache has every object; None without a listing."""
        try:
            found = json.loads(self._path.read_bytes())["models"]
            models = {
                name: RemoteModel(
                    tuple(RemoteObject(*each) for each in of["objects"]), tuple(of["folders"])
                )
                for name, of in found.items()
            }
        except (OSError, ValueError, KeyError, TypeError):
            return None
        parts = {name: self._cached_part(name, each) for name, each in models.items()}
        return {name: each for name, each in parts.items() if each is not None}

    def _cached_part(self, name: str, model: RemoteModel) -> RemoteModel | None:
        skipped = len(name) + 1 if name else 0

        def top(key: str) -> str:
            return key[skipped:].partition("/")[0]

        missing = {top(each.key) for each in model.objects if not self._has(each)}
        if not all(each.isdecimal() for each in missing):
            return None

        def kept(keys: Iterable[str]) -> list[str]:
            return [key for key in keys if top(key) not in missing]

        objects = tuple(each for each in model.objects if top(each.key) not in missing)
        folders = tuple(each for each in model.folders if top(each) not in missing)
        versions = [
            key for key in (*kept(e.key for e in objects), *folders) if top(key).isdecimal()
        ]
        return RemoteModel(objects, folders) if versions or not missing else None

    def _has(self, each: RemoteObject) -> bool:
        return self._blobs.has(Blob.of(self._address, each).key)
