"""Model repositories on disk: models, versions and configurations."""

import errno
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config import ModelConfig, VersionPolicy
from gateway.config.pbtxt import parse, parse_json
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from gateway.models.instance_groups import NO_GPUS, UsableGpus
from gateway.models.model_folder import (
    RESERVED,
    Override,
    Snapshot,
    UploadedFolder,
    refuse_escapes,
    require_config_size,
    select_versions,
    take_snapshot,
    version_number,
)
from gateway.models.normalisation import normalise
from gateway.models.repository_agents import checksums, verify
from gateway.models.single_model import single_name
from gateway.models.supported_fields import ignored, require_supported


@dataclass(frozen=True, slots=True, order=True)
class ModelId:
    """A model's name, and its repository's path where names are unique only within one."""

    name: str
    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}::{self.name}" if self.namespace else self.name


log = logging.getLogger("sluice.repository")

IN_TWO_REPOSITORIES = "model appears in two or more repositories"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model's folder: its versions, ascending, and subfolders that are no versions."""

    name: str
    path: Path
    available: tuple[int, ...]
    ignored: tuple[str, ...] = ()

    def versions(self, policy: VersionPolicy | None) -> tuple[int, ...]:
        """The versions that the policy selects, ascending; INVALID_ARG if none."""
        if selected := select_versions(policy, self.available):
            return selected
        raise InferenceError(
            Code.INVALID_ARG,
            "at least one version must be available under the version policy of model "
            f"'{self.name}'",
        )

    def require(self, versions: Iterable[int]) -> None:
        """Raise NOT_FOUND for a version that the model does not have."""
        for number in sorted(set(versions) - set(self.available)):
            listed = ", ".join(map(str, self.available)) or "none"
            raise InferenceError(
                Code.NOT_FOUND, f"model '{self.name}' has no version {number}, it has {listed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The text of a configuration, "" if there is no file.

    `source` is the path relative to the repository. With `renames` the name in the text has no
    effect.
    """

    source: str
    text: str
    renames: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSource:
    """The input of a load: the folder's state, and the config before completion.

    `snapshot` was taken before any file was read. `upload` owns the folder of a client's files;
    `overridden` marks a client's config. `chosen` are the versions that a client's load or unload
    of single versions has left, in place of those of the policy.
    """

    config: ModelConfig
    entry: ModelEntry
    snapshot: Snapshot
    upload: UploadedFolder | None = None
    overridden: bool = False
    chosen: frozenset[int] | None = None

    @property
    def folder(self) -> Path:
        """The model's folder, parent of the version folders."""
        return self.entry.path

    @property
    def selected(self) -> frozenset[int]:
        """The versions that a client has chosen, else those of the policy; maybe none."""
        if self.chosen is not None:
            return self.chosen
        return frozenset(select_versions(self.config.version_policy, self.entry.available))


class ModelRepository:
    """The models in some folders, read from disk at each call.

    `configs/<config_name>.pbtxt` of a model is preferred to its `config.pbtxt`. Without
    `auto_complete` a config must be complete. With `namespacing` several folders may have models of
    one name. A folder with a config.pbtxt or version folders when it is first read is the folder of
    one model: `model_name`, or "" for its own name. Raises InferenceError if a folder cannot be
    listed. No error names a folder above a repository.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        config_name: str = "",
        gpus: UsableGpus = NO_GPUS,
        *,
        auto_complete: bool = True,
        namespacing: bool = False,
        model_name: str = "",
    ) -> None:
        self._paths = tuple(dict.fromkeys(paths))
        found = {path: single_name(path, model_name) for path in self._paths}
        self._single = {path: name for path, name in found.items() if name is not None}
        self._config_name = config_name
        self._gpus = gpus
        self._auto_complete = auto_complete
        self._namespacing = namespacing
        self.names()
        self._warn_of_names()

    def names(self) -> tuple[str, ...]:
        """The names of all models, in order; each folder is a model."""
        return tuple(sorted({name for path in self._paths for name in self._models(path)}))

    def ids(self) -> tuple[ModelId, ...]:
        """All models, in order; without namespaces a name counts once."""
        found = {self._id(name, path) for path in self._paths for name in self._models(path)}
        return tuple(sorted(found))

    def named(self, name: str) -> tuple[ModelId, ...]:
        """The models of a name: none, one, or several with namespaces."""
        homes = {path: self._home(path, name) for path in self._paths}
        return tuple(sorted({self._id(name, path) for path, home in homes.items() if home}))

    def find(self, name: str, namespace: str = "") -> ModelEntry:
        """The model of a name: NOT_FOUND if there is none, INVALID_ARG if several."""
        homes = self._homes(name, namespace)
        if not homes:
            raise InferenceError(Code.NOT_FOUND, f"model '{name}' is not in any repository")
        if len(homes) > 1:
            raise InferenceError(Code.INVALID_ARG, IN_TWO_REPOSITORIES)
        return _entry(name, homes[0])

    def snapshot(self, model: ModelId) -> Snapshot:
        """The state of the model's folder, or of all folders of that name."""
        homes = self._homes(model.name, model.namespace)
        prefixes = [f"{number}:" if len(homes) > 1 else "" for number in range(len(homes))]
        return {
            prefix + name: stamp
            for prefix, home in zip(prefixes, homes, strict=True)
            for name, stamp in take_snapshot(home).items()
        }

    def snapshots(self) -> Mapping[ModelId, Snapshot | Exception]:
        """The state of every model's folder, or the error of its scan.

        Raises InferenceError if a repository cannot be listed.
        """
        return {model: self._snapshot_or_error(model) for model in self.ids()}

    def config_file(self, name: str) -> ConfigFile:
        """The text of the model's configuration; raises like `find`, or if unreadable."""
        return self._config_file(self.find(name))

    def read(self, name: str) -> ModelConfig:
        """The model's configuration, checked, before its backend completes it.

        Raises InferenceError: INVALID_ARG for an invalid file, UNSUPPORTED for a field that this
        release refuses.
        """
        return self._read(self.find(name))

    def source(self, model: ModelId, snapshot: Snapshot | None = None) -> LoadSource:
        """The source of a load; raises like `read`, or if a file has another checksum.

        The folder is not scanned again if `snapshot` is its state.
        """
        entry = self.find(model.name, model.namespace)
        if snapshot is None:
            snapshot = take_snapshot(entry.path)
        config = self._read(entry)
        verify(checksums(config), entry.path)
        return LoadSource(config=config, entry=entry, snapshot=snapshot)

    def overridden(self, model: ModelId, override: Override) -> LoadSource:
        """The source of a load with a client's override; uploaded files replace the folder's.

        Raises like `read`, and INVALID_ARG for an invalid override.
        """
        text = override.require_config()
        upload = UploadedFolder(override.files) if override.files else None
        try:
            home = upload.path if upload else self.find(model.name, model.namespace).path
            entry = _entry(model.name, home)
            written = parse_json(text)
            refuse_escapes(written)
            config = self._checked(written, entry)
            verify(checksums(config), home)
        except BaseException:
            if upload is not None:
                upload.release()
            raise
        snapshot = take_snapshot(home)
        return LoadSource(
            config=config, entry=entry, snapshot=snapshot, upload=upload, overridden=True
        )

    def _snapshot_or_error(self, model: ModelId) -> Snapshot | Exception:
        try:
            return self.snapshot(model)
        except Exception as error:  # noqa: BLE001 - around one model: the others are polled
            return error

    def _warn_of_names(self) -> None:
        for path in self._paths:
            for name in [] if path in self._single else _folders(path, path.name or str(path)):
                if not _is_utf8(name):
                    log.warning("folder is no model: not UTF-8", extra={"folder": ascii(name)})

    def _homes(self, name: str, namespace: str) -> list[Path]:
        searched = (Path(namespace),) if namespace else self._paths
        return [home for path in searched if (home := self._home(path, name)) is not None]

    def _home(self, path: Path, name: str) -> Path | None:
        """The folder of a model in a repository, None if it has no such model."""
        if path in self._single:
            return path if self._single[path] == name else None
        return path / name if _holds(path, name) else None

    def _models(self, path: Path) -> list[str]:
        """The names of the models; a name that is not UTF-8 has no form on any wire."""
        if path in self._single:
            _content(path, path.name or str(path))  # raises if there is no folder any more
            return [self._single[path]]
        return [name for name in _folders(path, path.name or str(path)) if _is_utf8(name)]

    def _id(self, name: str, path: Path) -> ModelId:
        return ModelId(name, str(path) if self._namespacing else "")

    def _read(self, entry: ModelEntry) -> ModelConfig:
        file = self._config_file(entry)
        if not (self._auto_complete or file.text):
            raise InferenceError(
                Code.INTERNAL,
                f"failed to open text file for read {file.source}: it is absent or empty, and "
                "--disable-auto-complete-config wants a whole configuration",
            )
        return self._checked(parse(file.text, file.source), entry)

    def _checked(self, written: ModelConfig, entry: ModelEntry) -> ModelConfig:
        if entry.path in self._single and written.name not in ("", entry.name):
            why = f"the model is served as '{entry.name}'"
            log.warning("field ignored", extra={"model": entry.name, "field": "name", "why": why})
            written = replace(written, name=entry.name)
        config = normalise(written, entry.name, _first_files(entry), self._gpus)
        if not self._auto_complete:
            check_tensors(config)
        require_supported(replace(written, name=entry.name))
        checksums(config)  # refuses other agents and algorithms
        _warn(entry, config.version_policy)
        for path, why in ignored(written, config.backend):
            log.warning("field ignored", extra={"model": entry.name, "field": path, "why": why})
        return config

    def _config_file(self, entry: ModelEntry) -> ConfigFile:
        custom = f"configs/{self._config_name}.pbtxt"
        preferred = self._config_name and (entry.path / custom).exists()
        chosen = custom if preferred else "config.pbtxt"
        source = f"{entry.name}/{chosen}"
        return ConfigFile(
            source=source,
            text=_text(entry.path / chosen, source),
            renames=entry.path in self._single,
        )


def _is_utf8(name: str) -> bool:
    # Bytes of a name that are not UTF-8 become surrogates (PEP 383).
    return name == name.encode("utf-8", "ignore").decode()


def _holds(path: Path, name: str) -> bool:
    """Whether there is a model folder of that name; a path is not a name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return (path / name).is_dir()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
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
    """The files of the lowest version; names of folders end in a slash."""
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
        require_config_size(f"'{source}'", path.stat().st_size)
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
