"""The files of a model: the state of its folder, versions, labels, and a client's override."""

import os
import posixpath
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gateway.config import ModelConfig, VersionPolicy
from gateway.errors import Code, InferenceError
from gateway.private_folder import PrivateFolder
from gateway.storage.store import ModelStore, StoreError

Snapshot = Mapping[str, tuple[int, int]]
"""Modification time (ns) and size (bytes) of each file by its path; a folder has size -1."""
Labels = Mapping[str, tuple[str, ...]]
"""The labels of each output that has a label file; the index of a class is its label's."""

CONFIG_FOLDER = "configs/"
CONFIG_FILE = "config.pbtxt"
GOLDEN_FOLDER = "golden/"
RESERVED = frozenset({"warmup", "initial_state", "configs", "golden"})
"""Folders of a model that are never versions."""
PLAN_FILE = "rollout.json"
"""The plan of rollouts: a change of it loads nothing."""
BYTECODE = "__pycache__"
"""The folder of the bytecode that Python writes for model.py: no part of the model."""
HIGHEST = 2**63 - 1
VERSIONS = "versions"
"""Parameter of a load or an unload: the versions that it is about."""
SHOWN_CHARS = 64
STORED_MODEL = "stored_model"
"""Parameter of a model: the name under which `sluice fetch` stored its files."""


def take_snapshot(folder: Path) -> Snapshot:
    """The state of a folder; disappearing files, bytecode and the plan of rollouts are omitted."""
    found: dict[str, tuple[int, int]] = {}
    unread = [_Folder(folder, "", frozenset())]
    while unread:  # not recursive: folders may be deeper than Python's stack
        unread += _read_entries(unread.pop(), found)
    return found


def by_version(snapshot: Snapshot) -> Mapping[int | None, Snapshot]:
    """The state of each version's files, and under None that of the files of all versions.

    The configuration files and the golden requests are in none of them.
    """
    found: dict[int | None, dict[str, tuple[int, int]]] = {None: {}}
    for name, stamp in snapshot.items():
        folder, slash, _ = name.partition("/")
        number = version_number(folder) if slash else None
        if name != CONFIG_FILE and not name.startswith((CONFIG_FOLDER, GOLDEN_FOLDER)):
            found.setdefault(number, {})[name] = stamp
    return found


def without_golden(snapshot: Snapshot) -> Snapshot:
    """The state without the golden requests: a version that serves is not loaded again for them."""
    return {name: stamp for name, stamp in snapshot.items() if not name.startswith(GOLDEN_FOLDER)}


class _Folder(NamedTuple):
    """A folder to scan; `above` are its ancestors, by device and inode."""

    path: Path
    prefix: str
    above: frozenset[tuple[int, int]]


def _read_entries(folder: _Folder, found: dict[str, tuple[int, int]]) -> list[_Folder]:
    """Add the stamps of a folder's entries; returns its subfolders.

    Links are followed, except to a folder above.
    """
    try:
        here = os.stat(folder.path)
        entries = list(os.scandir(folder.path))
    except OSError:
        return []
    itself = (here.st_dev, here.st_ino)
    if itself in folder.above:
        return []
    folders: list[_Folder] = []
    for entry in entries:
        try:
            status, is_folder = entry.stat(), entry.is_dir()
        except OSError:
            continue
        name = f"{folder.prefix}{entry.name}"
        if name == PLAN_FILE:
            continue
        if not is_folder:
            found[name] = (status.st_mtime_ns, status.st_size)
        elif entry.name != BYTECODE:
            found[f"{name}/"] = (0, -1)
            folders.append(_Folder(folder.path / entry.name, f"{name}/", folder.above | {itself}))
    return folders


def version_number(folder: str) -> int | None:
    """The version number of a folder's name, or None."""
    if not (folder.isascii() and folder.isdigit()) or int(folder) > HIGHEST:
        return None
    return int(folder) if str(int(folder)) == folder else None


def read_versions(text: str) -> frozenset[int]:
    """The version numbers in a list with commas; INVALID_ARG for any other text."""
    numbers = [version_number(each.strip()) for each in text.split(",")]
    found = frozenset(each for each in numbers if each is not None)
    if len(found) < len(numbers):
        raise InferenceError(
            Code.INVALID_ARG,
            f"parameter 'versions': found {text[:SHOWN_CHARS]!r}, expected version numbers such as "
            "'4' or '3,4', each once",
        )
    return found


def requested_version(version: str) -> int:
    """The number of a version in a request; INVALID_ARG with Triton's texts for others."""
    try:
        number = int(version)
    except ValueError:
        number = 2**63
    if number >= 2**63 or not version.removeprefix("-").isdigit():
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to get model version from specified version string '{version}' (details: "
            "stol), version should be an integral value > 0",
        )
    if number < 0:
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid model version specified '{version}' , version should be an integral value "
            "> 0",
        )
    return number


Versions = Mapping[str, Set[int]]
"""Versions of some models, by name."""
NO_VERSIONS: Versions = {}


def select_versions(
    policy: VersionPolicy | None, available: Iterable[int], left_out: Set[int] = frozenset()
) -> tuple[int, ...]:
    """The versions that the policy selects, ascending; without a policy the highest.

    If it selects no available one, but some that are `left_out`, it is the highest below them.
    """
    ascending = sorted(available)
    if found := _selected(policy, ascending):
        return found
    lost = _selected(policy, sorted(left_out))
    return tuple([each for each in ascending if lost and each < lost[0]][-1:])


def _selected(policy: VersionPolicy | None, ascending: Sequence[int]) -> tuple[int, ...]:
    if policy is None:
        return tuple(ascending[-1:])
    if policy.specific is not None:
        return tuple(each for each in ascending if each in policy.specific.versions)
    if policy.latest is not None:
        count = policy.latest.num_versions
        return tuple(ascending[len(ascending) - min(count, len(ascending)) :])
    return tuple(ascending)


def read_labels(config: ModelConfig, folder: Path) -> Labels:
    """The labels in the label files of a config, one per line, by output.

    File names are relative to the model's folder. Raises UNSUPPORTED for a file outside the folder,
    INTERNAL for an unreadable file.
    """
    return {
        output.name: _read_labels(output.label_filename, config.name, folder)
        for output in config.output
        if output.label_filename
    }


def _read_labels(filename: str, model: str, folder: Path) -> tuple[str, ...]:
    path = folder / filename
    if "\0" in filename or not path.resolve().is_relative_to(folder.resolve()):
        raise InferenceError(
            Code.UNSUPPORTED,
            f"label file path '{filename}' is outside model directory of model '{model}'",
        )
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InferenceError(
            Code.INTERNAL,
            f"failed to open text file for read {model}/{filename}: {error.strerror}",
        ) from None
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


FILE_PREFIX = "file:"
MOST_FILES = 256
"""Files of one upload."""
MOST_UPLOADED_BYTES = 1 << 30
"""Bytes of all files of one upload."""
MOST_CONFIG_BYTES = 16 << 20
"""Bytes of one configuration: its parsed form takes many times as many."""


def files_folder(config: ModelConfig, version: Path, store: Path) -> Path:
    """The folder whose files the backend loads: the version's, or that of a stored model.

    A config names a stored model in its parameters. A version with the model's own file keeps its
    folder, for a model.py and its files; the model.py gets the path of the stored model. Raises
    InferenceError: INVALID_ARG for a name that is a path, UNAVAILABLE if it is not stored.
    """
    name = config.parameters.get(STORED_MODEL)
    if name is None:
        return version
    models = ModelStore(store)
    try:
        folder = models.path(name)
    except StoreError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"model '{config.name}': parameter '{STORED_MODEL}': {error}"
        ) from None
    if not _is_stored(models, name):
        raise InferenceError(
            Code.UNAVAILABLE,
            f"model '{config.name}': its parameter '{STORED_MODEL}' names '{name}', which is not "
            f"in the model store, or damaged there; run: sluice fetch {name}",
        )
    own = config.default_model_filename
    return version if own and (version / own).exists() else folder


def _is_stored(models: ModelStore, name: str) -> bool:
    try:
        return models.has(name)
    except StoreError:  # its text names folders of this host; `sluice fetch` shows it
        return False


@dataclass(frozen=True, slots=True)
class Override:
    """The parameters of a load request.

    `config` is JSON that replaces `config.pbtxt`; `files` are by path, with the prefix `file:`.
    `versions` are to be served besides those that serve; without any it is those of the policy.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    versions: frozenset[int] = frozenset()

    @property
    def replaces(self) -> bool:
        """Whether it has a configuration or files in place of those on disk."""
        return self.config is not None or bool(self.files)

    def require_config(self) -> str:
        """The configuration; INVALID_ARG if there are only files, or if it is too large."""
        if self.config is None:
            raise InferenceError(
                Code.INVALID_ARG,
                "Load parameter 'config' must be specified for model file override",
            )
        require_config_size("load parameter 'config'", len(self.config))
        return self.config


def require_config_size(source: str, size: int) -> None:
    """Raise INVALID_ARG for a configuration of more than MOST_CONFIG_BYTES."""
    if size > MOST_CONFIG_BYTES:
        raise InferenceError(
            Code.INVALID_ARG,
            f"{source} has a configuration of {size} bytes, expected at most {MOST_CONFIG_BYTES}",
        )


class UploadedFolder:
    """Uploaded files in a private folder, which is deleted after its last `release`.

    It is also deleted when the object is collected. Raises INVALID_ARG for a path outside the
    folder, for a path that is both a folder and a file, and for more than MOST_FILES files or
    MOST_UPLOADED_BYTES.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        _require_upload_size(files)
        paths = {stay_inside(name): data for name, data in files.items()}
        folder = _private_folder()
        self.path = folder.path
        self._delete = weakref.finalize(self, folder.remove)
        self._holders = 1
        try:
            for relative, data in paths.items():
                _write(self.path, relative, data)
        except BaseException:
            self.release()
            raise

    def hold(self) -> None:
        """Keep the folder until one more `release`."""
        self._holders += 1

    def release(self) -> None:
        """Release the folder; the last release deletes it."""
        self._holders -= 1
        if not self._holders:
            self._delete()


def _require_upload_size(files: Mapping[str, bytes]) -> None:
    size = sum(map(len, files.values()))
    if len(files) > MOST_FILES or size > MOST_UPLOADED_BYTES:
        raise InferenceError(
            Code.INVALID_ARG,
            f"the load has {len(files)} files of {size} bytes, expected at most {MOST_FILES} files "
            f"and {MOST_UPLOADED_BYTES} bytes; copy the model to a repository",
        )


def stay_inside(parameter: str) -> str:
    """The normalised path of a parameter `file:<path>`, relative to the model's folder.

    Raises INVALID_ARG for a path outside it (model repository extension, file override).
    """
    name = parameter.removeprefix(FILE_PREFIX)
    normal = posixpath.normpath(name.lstrip("/") or ".")
    if normal in (".", "..") or normal.startswith("../") or "\0" in name:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Invalid file parameter '{parameter}' with normalized path '{normal}' must stay "
            "within model directory.",
        )
    return normal


def leaves_folder(name: str) -> bool:
    """Whether a file name, below a folder, may lead out of it."""
    return name.startswith("/") or ".." in name.split("/")


def refuse_escapes(config: ModelConfig) -> None:
    """Raise INVALID_ARG if a client's config names a file outside the version's folder."""
    for name in (config.default_model_filename, *config.cc_model_filenames.values()):
        if leaves_folder(name):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model file '{name}' of model '{config.name}' must stay within the version's "
                "folder",
            )


def _private_folder() -> PrivateFolder:
    try:
        return PrivateFolder.make("sluice-upload-")
    except OSError as error:
        raise InferenceError(
            Code.INTERNAL, f"no folder can be made for uploaded files: {error.strerror}"
        ) from None


def _write(folder: Path, relative: str, data: bytes) -> None:
    try:
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InferenceError(
            Code.INVALID_ARG, f"file parameter 'file:{relative}' cannot be written: {reason}"
        ) from None
