"""The state directory: a record on disk for each model with rollouts."""

import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import msgspec
from msgspec import field

from gateway.errors import Code, InferenceError, exiting
from gateway.models.model_folder import Snapshot
from gateway.rollouts.rollout import Rollout, Transition

FORMAT = 1
FOLDER = "rollouts"
FOLDER_MODE, FILE_MODE = 0o700, 0o600
DAMAGED = ".damaged"
LONGEST_NAME = 200
"""Longest quoted name of a model that is the name of its file (characters)."""
NO_ROLLOUT = b'"stable":0,"rollout":null'
"""A part of each record that has labels only, near its begin."""
MOST_TRANSITIONS = 1000
"""Transitions of ended rollouts that a record keeps."""


class RolloutRecord(msgspec.Struct, kw_only=True):
    """The rollouts of one model, as they are on disk.

    `stable` is the version that answers requests without a version once no rollout is open; 0 is
    Triton's rule. `stamps` are digests of the versions' files. `bad` are versions that were rolled
    back, `unloadable` those that did not load, by the digest of their files. `passed_over` are
    those above `stable` on disk since it became so. `evidence` is that of
    the open rollout. `history` has the transitions of ended rollouts, oldest first. `labels` are
    those that clients have set.
    """

    format: int = FORMAT
    model: str
    stable: int = 0
    rollout: Rollout | None = None
    salt: str = ""
    stamps: dict[int, str] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    unloadable: dict[int, str] = field(default_factory=dict)
    passed_over: dict[int, str] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    history: list[Transition] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def refuse(self, stamps: Mapping[int, str], *, is_start: bool) -> dict[int, str]:
        """The reasons against versions that were rolled back; at the start, that did not load."""
        self.bad = {n: each for n, each in self.bad.items() if stamps.get(n) == each}
        self.unloadable = {n: s for n, s in self.unloadable.items() if stamps.get(n) == s}
        refused = dict.fromkeys(self.bad, "rolled back; its files have not changed since")
        if is_start:
            refused |= dict.fromkeys(self.unloadable, "not loaded: its last load has failed")
        return refused if stamps.keys() - refused.keys() else {}

    def keeps_stable(self, selected: Collection[int], stamps: Mapping[int, str]) -> bool:
        """Whether `stable` answers without a plan: it is not the highest, and none above is new."""
        above = {n: stamp for n, stamp in stamps.items() if n > self.stable}
        is_needed = self.stable in selected and self.stable < max(selected)
        return is_needed and above.items() <= self.passed_over.items()


def digest(snapshot: Snapshot, version: int) -> str:
    """The digest of the names, times and sizes of a version's files."""
    prefix = f"{version}/"
    files = sorted((name, stamp) for name, stamp in snapshot.items() if name.startswith(prefix))
    return blake2b(repr(files).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


class DamagedRecord(ValueError):
    """A record that cannot be decoded; one of labels alone had no rollout (`had_rollout`)."""

    def __init__(self, reason: str, *, had_rollout: bool) -> None:
        super().__init__(reason)
        self.had_rollout = had_rollout


class OvertakenRecord(InferenceError):
    """A record that another server has written since this one has read it."""

    def __init__(self, model: str) -> None:
        text = f"another server has changed the state of '{model}'; it is read at the next load"
        super().__init__(Code.UNAVAILABLE, f"{text} (--state-directory)")


class StateDirectory:
    """Records in a folder that one server at a time writes; its methods block, in any thread.

    `path` None is a server without a place for its state.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock: Any = None
        self._mutex = threading.Lock()
        self._closed = False
        self._written: dict[str, int] = {}
        self._found: dict[str, bytes | None] = {}

    @property
    def has_place(self) -> bool:
        """Whether there is a folder."""
        return self._path is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_taken(self) -> bool:
        """Whether this server has the folder."""
        return self._lock is not None

    def close(self) -> None:
        """Let another server have the folder; nothing is written any more. It does not block.

        A write under way keeps the folder until it ends.
        """
        self._closed = True
        if self._mutex.acquire(blocking=False):
            try:
                lock, self._lock = self._lock, None
                if lock is not None:
                    lock.release()
            finally:
                self._mutex.release()

    def require(self) -> None:
        """Take the folder for this server; UNAVAILABLE if another has it, or it takes no files."""
        with self._used():
            self._take()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """The folder, for one thread at a time; one that was closed meanwhile is released."""
        try:
            with self._mutex:
                yield
        finally:
            if self._closed:
                self.close()

    def _take(self) -> None:
        if self._lock is not None:
            return
        if self._closed:
            raise exiting()
        folder = self._folder
        try:
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            lock = _taken(folder)
        except OSError as error:
            raise _full(error) from None
        try:
            _write(folder / ".pid", str(os.getpid()).encode())
        except OSError as error:
            lock.release()
            raise _full(error) from None
        self._lock = lock

    def read(self, model: str) -> RolloutRecord | None:
        """The record of a model, if there is one.

        Raises DamagedRecord, after the file was moved aside, and UNAVAILABLE.
        """
        if self._path is None:
            return None
        path = self._file(model)
        try:
            content = self._content(path)
            self._found[model] = content
            if content is None:
                return None
            found = msgspec.json.decode(content, type=RolloutRecord)
        except OSError as error:
            raise unusable(f"the state of '{model}' cannot be read: {error.strerror}") from None
        except msgspec.DecodeError as error:
            self.require()
            path.replace(path.with_name(path.name + DAMAGED))
            self._found[model] = None
            raise DamagedRecord(
                str(error), had_rollout=NO_ROLLOUT not in (content or b"")
            ) from None
        if found.format != FORMAT or found.model != model:
            raise unusable(f"the state of '{model}' has format {found.format}, expected {FORMAT}")
        return found

    def write(self, model: str, record: bytes, order: int = 0) -> None:
        """Replace the record of a model; it is on disk when this returns. Raises as `require`.

        A record whose `order` is below that of the last one is late, and dropped. Raises
        OvertakenRecord for one that another server has written since it was read.
        """
        with self._used():
            if self._closed or order < self._written.get(model, 0):
                return
            self._take()
            path = self._file(model)
            try:
                is_first = model not in self._written and model in self._found
                if is_first and self._content(path) != self._found[model]:
                    raise OvertakenRecord(model)
                _write(path, record)
            except OSError as error:
                raise _full(error) from None
            self._written[model] = order

    @staticmethod
    def _content(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    @property
    def _folder(self) -> Path:
        if self._path is None:
            raise unusable("there is no state directory")
        return self._path / FOLDER

    def _file(self, model: str) -> Path:
        name = quote(model, safe="")
        if len(name) > LONGEST_NAME:
            name = blake2b(model.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        return self._folder / f"{name}.json"


def _taken(folder: Path) -> Any:
    """The lock of the folder; UNAVAILABLE names the process that holds it."""
    # The import takes 10 ms, and servers without rollouts do without it.
    filelock = import_module("filelock")
    lock = filelock.FileLock(folder / ".lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise unusable(f"process {_owner(folder)} has the state directory") from None
    return lock


def _owner(folder: Path) -> str:
    try:
        return (folder / ".pid").read_text() or "?"
    except OSError:
        return "?"


def _write(path: Path, data: bytes) -> None:
    """Replace a file; after a crash it is the old or the new one, whole."""
    building = path.with_name(path.name + ".new")
    descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        building.replace(path)
    except OSError:
        building.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _full(error: OSError) -> InferenceError:
    return unusable(f"the state directory takes no files: {error.strerror}")


def unusable(reason: str) -> InferenceError:
    """The error of a state directory that cannot be used."""
    return InferenceError(Code.UNAVAILABLE, f"{reason} (--state-directory)")
