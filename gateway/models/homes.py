"""Homes of models: local folders, and mirrors of repositories in object storage."""

import errno
from abc import ABC, abstractmethod
from pathlib import Path

from gateway.errors import Code, InferenceError
from gateway.models.model_folder import (
    PLAN_FILE,
    Snapshot,
    require_config_size,
    take_snapshot,
)
from gateway.storage.mirror.errors import MirrorError
from gateway.storage.mirror.mirror import Mirror, RemoteFolder


class Home(ABC):
    """One repository, which is read at each call.

    Paths are relative to it, "" is itself. `name` is shown in errors, which name no folder above;
    `namespace` identifies it among the repositories of a server.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace

    @abstractmethod
    def content(self, folder: str, shown: str) -> list[str]:
        """The names in a folder, in order, folders with a slash; `shown` is its name in errors.

        Raises NOT_FOUND if there is no such folder, INVALID_ARG for a file, INTERNAL if it is
        unreadable.
        """

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether there is a folder of that name, which is no path; raises INTERNAL."""

    @abstractmethod
    def text(self, file: str, shown: str) -> str:
        """The text of a configuration, "" if there is no file; raises like `content`."""

    @abstractmethod
    def snapshot(self, folder: str) -> Snapshot:
        """The state of a folder, without the plan of rollouts."""

    @abstractmethod
    def open(self, folder: str) -> "Path | RemoteFolder":
        """The folder on this machine, or the remote one that a load fetches to it."""


class LocalHome(Home):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.name or str(path), str(path))
        self.path = path

    def content(self, folder: str, shown: str) -> list[str]:
        path = self.path / folder
        try:
            return sorted(
                f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir()
            )
        except FileNotFoundError:
            raise _missing(shown) from None
        except NotADirectoryError:
            raise InferenceError(
                Code.INVALID_ARG, f"found that '{shown}' is a file, expected a folder"
            ) from None
        except OSError as error:
            raise _unreadable(shown, error) from None

    def holds(self, name: str) -> bool:
        try:
            return (self.path / name).is_dir()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return False
            raise _unreadable(name, error) from None

    def text(self, file: str, shown: str) -> str:
        path = self.path / file
        try:
            require_config_size(f"'{shown}'", path.stat().st_size)
            return path.read_text(encoding="utf-8", errors="surrogateescape")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise _unreadable(shown, error) from None

    def snapshot(self, folder: str) -> Snapshot:
        return take_snapshot(self.path / folder)

    def open(self, folder: str) -> Path:
        return self.path / folder


class RemoteHome(Home):
    """A repository in object storage, as its last good listing shows it."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(mirror.address.rpartition("/")[2], mirror.address)
        self.mirror = mirror

    def content(self, folder: str, shown: str) -> list[str]:
        found = self.mirror.files.content(folder)
        if found is None:
            raise _missing(shown)
        return found

    def holds(self, name: str) -> bool:
        return self.mirror.files.content(name) is not None

    def text(self, file: str, shown: str) -> str:
        found = self.mirror.files.file(file)
        if found is None:
            return ""
        require_config_size(f"'{shown}'", found.size)
        try:
            return self.mirror.read(file).decode("utf-8", "surrogateescape")
        except MirrorError as error:
            raise InferenceError(Code.UNAVAILABLE, str(error)) from None

    def snapshot(self, folder: str) -> Snapshot:
        found = self.mirror.files.snapshot(folder)
        return {name: stamp for name, stamp in found.items() if name != PLAN_FILE}

    def open(self, folder: str) -> RemoteFolder:
        return self.mirror.folder(folder)


def home_of(place: Path | Mirror) -> Home:
    """The home at a place."""
    return LocalHome(place) if isinstance(place, Path) else RemoteHome(place)


def join(folder: str, name: str) -> str:
    """The path of a name in a folder."""
    return f"{folder}/{name}" if folder else name


def _unreadable(shown: str, error: OSError) -> InferenceError:
    """The error of a file or folder that the system refuses."""
    return InferenceError(Code.INTERNAL, f"'{shown}' cannot be read: {error.strerror}")


def _missing(shown: str) -> InferenceError:
    return InferenceError(Code.NOT_FOUND, f"folder '{shown}' does not exist")
