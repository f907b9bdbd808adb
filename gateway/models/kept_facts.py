"""Facts of versions that only their instances know, kept on disk for the time they are asleep."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

log = logging.getLogger("sluice.residence")


class KeptFacts(msgspec.Struct, frozen=True):
    """The facts of one version, as its instances had them last.

    `load` is the identity of its files and config. `memory` are bytes by place, empty if they were
    not measured.
    """

    load: str
    memory: dict[str, int]
    load_secs: float
    adapters: tuple[str, ...] = ()
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The folder of a version's files, and the function of the identity of its load; it blocks."""

    folder: Path
    identify: Callable[[], bytes]


class FactsFolder:
    """A folder with the facts of versions; None keeps nothing. Its methods block."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, version: Path, load: str) -> KeptFacts | None:
        """The facts of a version folder; None without any of that load."""
        path = self._path(version)
        if path is None:
            return None
        try:
            found = msgspec.json.decode(path.read_bytes(), type=KeptFacts)
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.load == load else None

    def write(self, version: Path, facts: KeptFacts) -> None:
        """Keep the facts of a version folder; without the right to write, they are not kept."""
        path = self._path(version)
        if path is None:
            return
        written = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written.write_bytes(msgspec.json.encode(facts))
            written.replace(path)
        except OSError as error:
            log.warning("facts of a model not kept", extra={"reason": error.strerror})

    def _path(self, version: Path) -> Path | None:
        """Names of models may be no names of files."""
        if self._folder is None:
            return None
        name = hashlib.blake2b(os.fsencode(version.absolute()), digest_size=16).hexdigest()
        return self._folder / f"{name}.json"
