"""Which models are on disk, in which versions, and how are they configured?"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config import ModelConfig, VersionPolicy
from gateway.errors import Code, InferenceError
from gateway.models.normalisation import check_tensors, normalise
from gateway.models.pbtxt import parse
from gateway.models.support import require_supported
from gateway.models.versions import RESERVED, select_versions, version_number

log = logging.getLogger("sluice.repository")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model's folder: its versions, ascending, and folders that hold none."""

    name: str
    path: Path
    available: tuple[int, ...]
    ignored: tuple[str, ...] = ()

    def versions(self, policy: VersionPolicy | None) -> tuple[int, ...]:
        """The versions that the policy serves, ascending; INVALID_ARG if there is none."""
        if selected := select_versions(policy, self.available):
            return selected
        raise InferenceError(
            Code.INVALID_ARG,
            "at least one version must be available under the version policy of model "
            f"'{self.name}'",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The text of a configuration, "" if there is none; `source` is relative to the repository."""

    source: str
    text: str


class ModelRepository:
    """The models below some folders, as they are on disk when asked; it keeps nothing in memory.

    `config_name` prefers `configs/<config_name>.pbtxt` of each model to its `config.pbtxt`. `gpus`
    are the usable ones of this machine. Raises InferenceError if a folder cannot be listed. No
    error names a folder above a repository.
    """

    def __init__(
        self, paths: Sequence[Path], config_name: str = "", gpus: Sequence[int] = ()
    ) -> None:
        self._paths = tuple(dict.fromkeys(paths))
        self._config_name = config_name
        self._gpus = tuple(gpus)
        self.names()

    def names(self) -> tuple[str, ...]:
        """Every model in any of the repositories, in order; a folder is a model."""
        return tuple(sorted({name for path in self._paths for name in _models(path)}))

    def find(self, name: str) -> ModelEntry:
        """The model of that name: NOT_FOUND if there is none, INVALID_ARG if there are several."""
        homes = [path / name for path in self._paths if _holds(path, name)]
        if not homes:
            raise InferenceError(Code.NOT_FOUND, f"model '{name}' is not in any repository")
        if len(homes) > 1:
            raise InferenceError(Code.INVALID_ARG, "model appears in two or more repositories")
        return _entry(name, homes[0])

    def config_file(self, name: str) -> ConfigFile:
        """The text of the model's configuration; raises like `find`, and if it is unreadable."""
        return self._config_file(self.find(name))

    def read(self, name: str) -> ModelConfig:
        """The model's configuration, whole and checked, before its backend has completed it.

        Raises InferenceError: INVALID_ARG for what the file says, UNSUPPORTED for what this
        release cannot do.
        """
        entry = self.find(name)
        file = self._config_file(entry)
        written = parse(file.text, file.source)
        config = normalise(written, name, _first_files(entry), self._gpus)
        check_tensors(config)
        require_supported(replace(written, name=name))
        _warn(entry, config.version_policy)
        return config

    def _config_file(self, entry: ModelEntry) -> ConfigFile:
        custom = f"configs/{self._config_name}.pbtxt"
        preferred = self._config_name and (entry.path / custom).exists()
        chosen = custom if preferred else "config.pbtxt"
        source = f"{entry.name}/{chosen}"
        return ConfigFile(source=source, text=_text(entry.path / chosen, source))


def _models(path: Path) -> list[str]:
    return _folders(path, path.name or str(path))


def _holds(path: Path, name: str) -> bool:
    """Whether there is a folder of that name; a path that leads elsewhere is no name."""
    if name in ("", ".", "..") or "/" in name:
        return False
    try:
        return (path / name).is_dir()
    except OSError as error:
        raise _unreadable(name, error) from None


def _entry(name: str, path: Path) -> ModelEntry:
    numbers = {folder: version_number(folder) for folder in _folders(path, name)}
    return ModelEntry(
        name=name,
        path=path,
        available=tuple(sorted(each for each in numbers.values() if each is not None)),
        ignored=tuple(
            folder
            for folder, number in numbers.items()
            if number is None and folder not in RESERVED
        ),
    )


def _folders(path: Path, source: str) -> list[str]:
    return [name.removesuffix("/") for name in _content(path, source) if name.endswith("/")]


def _first_files(entry: ModelEntry) -> frozenset[str]:
    """What is in the lowest version; the names of folders end in a slash."""
    if not entry.available:
        return frozenset()
    folder = str(entry.available[0])
    return frozenset(_content(entry.path / folder, f"{entry.name}/{folder}"))


def _content(path: Path, source: str) -> list[str]:
    try:
        return sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())
    except FileNotFoundError:
        raise InferenceError(Code.NOT_FOUND, f"folder '{source}' does not exist") from None
    except NotADirectoryError:
        raise InferenceError(
            Code.INVALID_ARG, f"found that '{source}' is a file, expected a folder"
        ) from None
    except OSError as error:
        raise _unreadable(source, error) from None


def _text(path: Path, source: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unreadable(source, error) from None


def _unreadable(source: str, error: OSError) -> InferenceError:
    return InferenceError(Code.INTERNAL, f"'{source}' cannot be read: {error.strerror}")


def _warn(entry: ModelEntry, policy: VersionPolicy | None) -> None:
    for folder in entry.ignored:
        log.warning("folder is no version", extra={"model": entry.name, "folder": folder})
    if policy is not None and policy.specific is not None:
        for version in policy.specific.versions:
            if version not in entry.available:
                log.error("version missing", extra={"model": entry.name, "version": version})
