"""Which configuration would fit a model file? What `sluice config` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig
from gateway.config.platforms import PLATFORMS, Platform
from gateway.errors import Code, InferenceError
from gateway.models.model_folder import version_number
from gateway.models.normalisation import normalise
from gateway.models.repository import ModelRepository
from gateway.tools.draft_text import draft_text

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One model file, or folder that is one: who runs it, and the model that it makes.

    `folder` is the one that holds it; `home` is the model's folder, None outside a repository.
    """

    model: str
    folder: Path
    filename: str
    platform: Platform
    home: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The text of a configuration, and where it belongs; `path` is None outside a repository."""

    text: str
    path: Path | None


def find_file(repository: ModelRepository, name: str) -> ModelFile:
    """The file in the highest version of a model; InferenceError if there is not exactly one."""
    if name not in repository.names():
        known = ", ".join(repository.names()) or "none"
        raise InferenceError(
            Code.NOT_FOUND, f"model '{name}' is not in any repository; found: {known}"
        )
    entry = repository.find(name)
    if not entry.available:
        raise InferenceError(
            Code.INVALID_ARG, f"model '{name}' has no version; expected a folder '{name}/1'"
        )
    folder = entry.path / str(entry.available[-1])
    shown = f"{name}/{folder.name}"
    filename, platform = _only(shown, _candidates([each.name for each in folder.iterdir()]))
    return ModelFile(
        model=name, folder=folder, filename=filename, platform=platform, home=entry.path
    )


def open_file(path: Path) -> ModelFile:
    """The model file at a path, in a repository or anywhere else; InferenceError if it is none."""
    if not path.exists():
        raise InferenceError(Code.NOT_FOUND, f"'{path.name}' does not exist")
    candidates = _candidates([path.name])
    if not candidates:
        raise InferenceError(
            Code.INVALID_ARG, f"'{path.name}' is no model file; expected {_expected()}"
        )
    filename, platform = candidates[0]
    folder = path.absolute().parent
    home = folder.parent if version_number(folder.name) is not None else None
    return ModelFile(
        model=home.name if home else path.stem,
        folder=folder,
        filename=filename,
        platform=platform,
        home=home,
    )


def draft(file: ModelFile, backends: BackendLoader) -> Draft:
    """What the file's backend says about it; whatever a `config.pbtxt` there says is not read.

    Raises InferenceError if the backend is not installed or refuses the file.
    """
    config = ModelConfig(
        backend=file.platform.backend,
        platform=file.platform.name,
        default_model_filename=file.filename,
    )
    whole = normalise(config, file.model)
    described = backends.get(whole.backend).describe(whole, file.folder)
    origin = f"{file.folder.name}/{file.filename}" if file.home else file.filename
    is_default = file.filename == file.platform.filename
    text = draft_text(described, origin, "" if is_default else file.filename)
    return Draft(text=text, path=file.home / CONFIG_FILE if file.home else None)


Candidates = list[tuple[str, Platform]]


def _candidates(names: Sequence[str]) -> Candidates:
    """The model files among the names: those with a default name, else those of its kind."""
    exact = [(each.filename, each) for each in PLATFORMS if each.filename in names]
    return exact or [
        (name, each)
        for name in sorted(names)
        for each in PLATFORMS
        if each.backend != "python" and Path(name).suffix == Path(each.filename).suffix
    ]


def _only(shown: str, candidates: Candidates) -> tuple[str, Platform]:
    if not candidates:
        raise InferenceError(
            Code.NOT_FOUND, f"'{shown}' holds no model file; expected {_expected()}"
        )
    if len(candidates) > 1:
        found = ", ".join(name for name, _ in candidates)
        raise InferenceError(
            Code.INVALID_ARG,
            f"'{shown}' holds several model files: {found}; give the path of one of them",
        )
    return candidates[0]


def _expected() -> str:
    return ", ".join(each.filename for each in PLATFORMS)
