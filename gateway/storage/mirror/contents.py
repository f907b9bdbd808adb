"""The models of a remote repository, as listings show them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from gateway.storage.remote.objects import RemoteListing, RemoteObject

UPLOADING = ".uploading"
"""A file of a model that is being uploaded."""
CONFIG_FILE = "config.pbtxt"
BYTECODE = "__pycache__"
NAME_BYTES = 255
"""Longest name of a file on Linux."""
NS = 10**9


@dataclass(frozen=True)
class RemoteModel:
    """The objects of one model, or of a repository that is the folder of one model.

    Keys are those of the repository. `folders` are those that have objects of their own.
    """

    objects: tuple[RemoteObject, ...]
    folders: tuple[str, ...] = ()

    @cached_property
    def identity(self) -> frozenset[tuple[str, str, int]]:
        """The part that differs between two listings if the model has changed."""
        found = {(each.key, each.etag, each.size) for each in self.objects}
        return frozenset(found | {(f"{each}/", "", -1) for each in self.folders})

    @property
    def is_uploading(self) -> bool:
        """Whether its marker says that files are missing."""
        return any(each.key.rpartition("/")[2] == UPLOADING for each in self.objects)

    def is_settled(self, now_ns: int, settle_secs: float) -> bool:
        """Whether no upload is under way, as far as a listing shows."""
        newest = max((each.modified_ns for each in self.objects), default=0)
        return not self.is_uploading and now_ns - newest >= settle_secs * NS


RemoteModels = Mapping[str, RemoteModel]
"""Models by the first part of their keys; one under "" is the whole repository."""


def is_one_model(listing: RemoteListing) -> bool:
    """Whether a repository may be the folder of one model: it has a config or versions."""
    keys = {each.key for each in listing.objects if _is_file(each.key)}
    folders = {_first(each) for each in keys if "/" in each}.union(map(_first, listing.folders))
    return CONFIG_FILE in keys or any(each.isdecimal() for each in folders)


def models_of(listing: RemoteListing, *, one: bool) -> tuple[RemoteModels, tuple[str, ...]]:
    """The models of a listing, or the `one` that is the whole of it; keys that cannot be files."""
    parents = {parent for each in listing.objects for parent in _parents(each.key)}
    usable = [each for each in listing.objects if _is_file(each.key) and each.key not in parents]
    bad = {each.key for each in listing.objects} - {each.key for each in usable}
    folders = [each for each in listing.folders if _is_file(each)]
    found: dict[str, tuple[list[RemoteObject], list[str]]] = {}
    for each in usable:
        if one or "/" in each.key:
            found.setdefault("" if one else _first(each.key), ([], []))[0].append(each)
    for folder in folders:
        found.setdefault("" if one else _first(folder), ([], []))[1].append(folder)
    models = {name: RemoteModel(tuple(of), tuple(at)) for name, (of, at) in sorted(found.items())}
    return models, tuple(sorted(key for key in bad if BYTECODE not in key.split("/")))


def follow(
    accepted: RemoteModels,
    before: RemoteModels,
    now: RemoteModels,
    is_settled: Callable[[RemoteModel], bool],
) -> RemoteModels:
    """The models to serve after a listing.

    A change counts once two listings agree and it is settled; a model that is missing is dropped
    after two listings.
    """
    found: dict[str, RemoteModel] = {}
    for name in sorted(accepted.keys() | now.keys()):
        old, last, new = accepted.get(name), before.get(name), now.get(name)
        if new is not None and (_is_same(new, old) or (_is_same(new, last) and is_settled(new))):
            found[name] = new
        elif old is not None and (new is not None or last is not None):
            found[name] = old
    return found


class RemoteFiles:
    """The folders and files of models; paths are relative to the repository."""

    def __init__(self, models: RemoteModels) -> None:
        self._content: dict[str, dict[str, RemoteObject | None]] = {"": {}}
        for model in models.values():
            for folder in model.folders:
                self._add_folder(folder)
            for each in model.objects:
                folder, _, name = each.key.rpartition("/")
                self._add_folder(folder)
                self._content[folder][name] = each

    def content(self, folder: str) -> list[str] | None:
        """The names in a folder, in order, folders with a slash; None if there is none."""
        if folder not in self._content:
            return None
        found = self._content[folder].items()
        return sorted(name if each is not None else f"{name}/" for name, each in found)

    def file(self, path: str) -> RemoteObject | None:
        """The object of a file; None if there is none."""
        folder, _, name = path.rpartition("/")
        return self._content.get(folder, {}).get(name)

    def files(
        self, folder: str, without: Iterable[str] = ()
    ) -> Iterator[tuple[str, RemoteObject | None]]:
        """All below a folder, but for subfolders in `without`: paths in it, None for folders."""
        skipped = {f"{folder}/{each}" if folder else each for each in without}
        start = len(folder) + 1 if folder else 0
        unread = [folder]
        while unread:
            current = unread.pop()
            for name, each in self._content.get(current, {}).items():
                path = f"{current}/{name}" if current else name
                if path in skipped:
                    continue
                yield path[start:], each
                if each is None:
                    unread.append(path)

    def snapshot(self, folder: str) -> Mapping[str, tuple[int, int]]:
        """The state of a folder: a number of the ETag and the size of each file."""
        found = self.files(folder)
        return {
            path if each is not None else f"{path}/": (0, -1) if each is None else _stamp(each)
            for path, each in found
        }

    def _add_folder(self, folder: str) -> None:
        if folder not in self._content:
            self._content[folder] = {}
            parent, _, name = folder.rpartition("/")
            self._add_folder(parent)
            self._content[parent][name] = None


def _stamp(each: RemoteObject) -> tuple[int, int]:
    digest = blake2b(each.etag.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1, each.size


def _is_same(one: RemoteModel, other: RemoteModel | None) -> bool:
    return other is not None and one.identity == other.identity


def _parents(key: str) -> Iterator[str]:
    at = key.find("/")
    while at >= 0:
        yield key[:at]
        at = key.find("/", at + 1)


def _first(key: str) -> str:
    return key.partition("/")[0]


def _is_file(key: str) -> bool:
    """Whether a key can be the path of a file of a model."""
    if "\0" in key:
        return False
    return all(
        part not in ("", ".", "..", BYTECODE) and len(part.encode("utf-8", "replace")) <= NAME_BYTES
        for part in key.split("/")
    )
