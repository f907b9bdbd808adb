"""Model repositories: models, versions and configurations."""

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config import ModelConfig, VersionPolicy
from gateway.config.pbtxt import parse, parse_json
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from gateway.models.homes import Home, LocalHome, RemoteHome, home_of, join
from gateway.models.instance_groups import NO_GPUS, UsableGpus
from gateway.models.mirrors import RemoteRepositories
from gateway.models.model_folder import (
    CONFIG_FILE,
    NO_VERSIONS,
    RESERVED,
    Override,
    Snapshot,
    UploadedFolder,
    refuse_escapes,
    select_versions,
    version_number,
)
from gateway.models.normalisation import normalise
from gateway.models.repository_agents import checksums, verify
from gateway.models.single_model import single_name
from gateway.models.supported_fields import ignored, place_of, require_supported
from gateway.storage.mirror.mirror import Mirror, RemoteFolder
from gateway.storage.mirror.trees import RemoteTree


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
    """A model's folder in its home: its versions, ascending, and subfolders that are none.

    `files` is the folder on this machine, or the remote one that a load fetches to it.
    """

    name: str
    home: Home
    folder: str
    files: Path | RemoteFolder
    available: tuple[int, ...]
    left_out: Set[int] = frozenset()
    ignored: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The folder on this machine; UNSUPPORTED if the model is in object storage."""
        if isinstance(self.files, RemoteFolder):
            raise InferenceError(
                Code.UNSUPPORTED, f"model '{self.name}' is in object storage, expected a folder"
            )
        return self.files

    def text(self, file: str) -> str:
        """The text of a file of the model, "" if there is none; blocks, and may download it."""
        return self.home.text(join(self.folder, file), f"{self.name}/{file}")

    @property
    def first_files(self) -> frozenset[str]:
        """The names in the lowest version; those of folders end in a slash."""
        if not self.available:
            return frozenset()
        version = str(self.available[0])
        return frozenset(self.home.content(join(self.folder, version), f"{self.name}/{version}"))

    def versions(self, policy: VersionPolicy | None) -> tuple[int, ...]:
        """The versions that the policy selects, ascending; INVALID_ARG if none."""
        if selected := select_versions(policy, self.available, self.left_out):
            return selected
        which = f"under the version policy of model '{self.name}'"
        raise InferenceError(Code.INVALID_ARG, f"at least one version must be available {which}")

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

    `snapshot` was taken before any file was read. `upload` owns the folder of a client's files, and
    `tree` keeps that of a remote model once it is fetched; `overridden` marks a client's config.
    `chosen` are the versions that a client's load or unload of single versions has left, in place
    of those of the policy. A rollout has `refused` versions, which are not loaded.
    """

    config: ModelConfig
    entry: ModelEntry
    snapshot: Snapshot
    upload: UploadedFolder | None = None
    tree: RemoteTree | None = None
    overridden: bool = False
    chosen: frozenset[int] | None = None
    refused: frozenset[int] = frozenset()

    @property
    def folder(self) -> Path:
        """The model's folder, parent of the version folders."""
        return self.entry.path if self.tree is None else self.tree.path

    @property
    def available(self) -> tuple[int, ...]:
        """The versions that may be loaded, ascending."""
        return tuple(each for each in self.entry.available if each not in self.refused)

    @property
    def selected(self) -> frozenset[int]:
        """The versions that a client has chosen, else those of the policy; maybe none."""
        if self.chosen is not None:
            return self.chosen.intersection(self.available)
        return frozenset(select_versions(self.config.version_policy, self.available))


class ModelRepository:
    """The models in some homes, local folders or mirrors, read at each call.

    `configs/<config_name>.pbtxt` of a model is preferred to its `config.pbtxt`. Without
    `auto_complete` a config must be complete. With `namespacing` several folders may have models of
    one name. A folder with a config.pbtxt or version folders when it is first read is the folder of
    one model: `model_name`, or "" for its own name. Versions `left_out` do not count. Raises
    InferenceError if a folder cannot be listed. No error names a folder above a repository.
    """

    def __init__(
        self,
        places: Sequence[Path | Mirror],
        config_name: str = "",
        gpus: UsableGpus = NO_GPUS,
        *,
        auto_complete: bool = True,
        namespacing: bool = False,
        model_name: str = "",
    ) -> None:
        self.left_out = NO_VERSIONS
        self._homes = {home.namespace: home for home in map(home_of, dict.fromkeys(places))}
        found = {home: single_name(home, model_name) for home in self._homes.values()}
        self._single = {home: name for home, name in found.items() if name is not None}
        self._config_name = config_name
        self._gpus = gpus
        self._auto_complete = auto_complete
        self._namespacing = namespacing
        self.remote = RemoteRepositories(
            {
                home: self._single.get(home)
                for home in self._homes.values()
                if isinstance(home, RemoteHome)
            }
        )
        self.names()
        self._warn_of_names()

    def names(self) -> tuple[str, ...]:
        """The names of all models, in order; each folder is a model."""
        homes = self._homes.values()
        return tuple(sorted({name for home in homes for name in self._models(home)}))

    def ids(self) -> tuple[ModelId, ...]:
        """All models, in order; without namespaces a name counts once."""
        homes = self._homes.values()
        return tuple(
            sorted({self._id(name, home) for home in homes for name in self._models(home)})
        )

    def named(self, name: str) -> tuple[ModelId, ...]:
        """The models of a name: none, one, or several with namespaces."""
        return tuple(sorted({self._id(name, home) for home, _ in self._found(name, "")}))

    def find(self, name: str, namespace: str = "") -> ModelEntry:
        """The model of a name: NOT_FOUND if there is none, INVALID_ARG if several."""
        found = self._found(name, namespace)
        if not found:
            raise InferenceError(Code.NOT_FOUND, f"model '{name}' is not in any repository")
        if len(found) > 1:
            raise InferenceError(Code.INVALID_ARG, IN_TWO_REPOSITORIES)
        return _entry(name, *found[0], self.left_out.get(name, frozenset()))

    def snapshot(self, model: ModelId) -> Snapshot:
        """The state of the model's folder, or of all folders of that name."""
        found = self._found(model.name, model.namespace)
        prefixes = [f"{number}:" if len(found) > 1 else "" for number in range(len(found))]
        return {
            prefix + name: stamp
            for prefix, (home, folder) in zip(prefixes, found, strict=True)
            for name, stamp in home.snapshot(folder).items()
        }

    def snapshots(self) -> Mapping[ModelId, Snapshot | Exception]:
        """The state of every model's folder, or the error of its scan.

        Remote repositories are listed. Raises InferenceError if a repository cannot be listed.
        """
        self.remote.poll()
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

        The folder is not scanned again if `snapshot` is its state. Checksums of a remote model are
        verified when its files are fetched.
        """
        entry = self.find(model.name, model.namespace)
        if snapshot is None:
            snapshot = entry.home.snapshot(entry.folder)
        config = self._read(entry)
        _verify(config, entry)
        return LoadSource(config=config, entry=entry, snapshot=snapshot)

    def overridden(self, model: ModelId, override: Override) -> LoadSource:
        """The source of a load with a client's override; uploaded files replace the folder's.

        Raises like `read`, and INVALID_ARG for an invalid override.
        """
        text = override.require_config()
        upload = UploadedFolder(override.files) if override.files else None
        try:
            if upload is not None:
                entry = _entry(model.name, LocalHome(upload.path), "")
            else:
                entry = self.find(model.name, model.namespace)
            written = parse_json(text)
            refuse_escapes(written)
            config = self._checked(written, entry)
            _verify(config, entry)
        except BaseException:
            if upload is not None:
                upload.release()
            raise
        snapshot = entry.home.snapshot(entry.folder)
        return LoadSource(
            config=config, entry=entry, snapshot=snapshot, upload=upload, overridden=True
        )

    def _snapshot_or_error(self, model: ModelId) -> Snapshot | Exception:
        try:
            return self.snapshot(model)
        except Exception as error:  # noqa: BLE001 - around one model: the others are polled
            return error

    def _warn_of_names(self) -> None:
        for home in self._homes.values():
            for name in [] if home in self._single else _folders(home, "", home.name):
                if not _is_utf8(name):
                    log.warning("folder is no model: not UTF-8", extra={"folder": ascii(name)})

    def _found(self, name: str, namespace: str) -> list[tuple[Home, str]]:
        """The homes that have a model of that name, each with its folder there."""
        homes = [self._homes[namespace]] if namespace else self._homes.values()
        found = [(home, self._folder(home, name)) for home in homes]
        return [(home, folder) for home, folder in found if folder is not None]

    def _folder(self, home: Home, name: str) -> str | None:
        """The folder of a model in a home, None if it has no such model; a path is no name."""
        if home in self._single:
            return "" if self._single[home] == name else None
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            return None
        return name if home.holds(name) else None

    def _models(self, home: Home) -> list[str]:
        """The names of the models; a name that is not UTF-8 has no form on any wire."""
        if home in self._single:
            home.content("", home.name)  # raises if there is no folder any more
            return [self._single[home]]
        return [name for name in _folders(home, "", home.name) if _is_utf8(name)]

    def _id(self, name: str, home: Home) -> ModelId:
        return ModelId(name, home.namespace if self._namespacing else "")

    def _read(self, entry: ModelEntry) -> ModelConfig:
        file = self._config_file(entry)
        if not (self._auto_complete or file.text):
            raise InferenceError(
                Code.INTERNAL,
                f"failed to open text file for read {file.source}: it is absent or empty, and "
                "--disable-auto-complete-config wants a whole configuration",
            )
        return self._checked(parse(file.text, file.source), entry, file.text)

    def _checked(self, written: ModelConfig, entry: ModelEntry, text: str = "") -> ModelConfig:
        if entry.home in self._single and written.name not in ("", entry.name):
            why = f"the model is served as '{entry.name}'"
            log.warning("field ignored", extra={"model": entry.name, "field": "name", "why": why})
            written = replace(written, name=entry.name)
        config = normalise(written, entry.name, entry.first_files, self._gpus)
        if not self._auto_complete:
            check_tensors(config)
        require_supported(replace(written, name=entry.name))
        checksums(config)  # refuses other agents and algorithms
        _warn(entry, config.version_policy)
        for path, why in ignored(written, config.backend):
            about = {"model": entry.name, **place_of(path, text), "why": why}
            log.warning("field ignored", extra=about)
        return config

    def _config_file(self, entry: ModelEntry) -> ConfigFile:
        custom = f"configs/{self._config_name}.pbtxt"
        preferred = self._config_name and _has(entry, custom)
        chosen = custom if preferred else CONFIG_FILE
        source = f"{entry.name}/{chosen}"
        text = entry.home.text(join(entry.folder, chosen), source)
        return ConfigFile(source=source, text=text, renames=entry.home in self._single)


def _is_utf8(name: str) -> bool:
    # Bytes of a name that are not UTF-8 become surrogates (PEP 383).
    return name == name.encode("utf-8", "ignore").decode()


def _entry(name: str, home: Home, folder: str, left_out: Set[int] = frozenset()) -> ModelEntry:
    files = home.open(folder)
    numbers = {each: version_number(each) for each in _folders(home, folder, name)}
    return ModelEntry(
        name=name,
        home=home,
        folder=folder,
        files=files,
        available=tuple(sorted({each for each in numbers.values() if each is not None} - left_out)),
        left_out=left_out,
        ignored=tuple(
            each for each, number in numbers.items() if number is None and each not in RESERVED
        ),
    )


def _has(entry: ModelEntry, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    try:
        return name in entry.home.content(join(entry.folder, folder), path)
    except InferenceError:
        return False


def _folders(home: Home, folder: str, shown: str) -> list[str]:
    names = home.content(folder, shown)
    return [name.removesuffix("/") for name in names if name.endswith("/")]


def _verify(config: ModelConfig, entry: ModelEntry) -> None:
    """Verify the checksums of files that are on this machine."""
    if isinstance(entry.files, Path):
        verify(checksums(config), entry.files)


def _warn(entry: ModelEntry, policy: VersionPolicy | None) -> None:
    for folder in entry.ignored:
        log.warning("folder is no version", extra={"model": entry.name, "folder": folder})
    if policy is not None and policy.specific is not None:
        for version in policy.specific.versions:
            if version not in entry.available:
                log.error("version missing", extra={"model": entry.name, "version": version})
