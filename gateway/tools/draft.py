"""Drafts of config.pbtxt for model files: the command `sluice config`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.backend import Description
from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.pbtxt import to_text
from gateway.config.platforms import PLATFORMS, Platform
from gateway.errors import Code, InferenceError
from gateway.models.model_folder import version_number
from gateway.models.normalisation import normalise
from gateway.models.repository import ModelRepository

CONFIG_FILE = "config.pbtxt"

Candidates = list[tuple[str, Platform]]
OF_ANY_CONTENT = (".json", ".py", ".txt")
"""Suffixes that do not identify a kind of model: only the default names do."""
BATCHED = """\
# The largest batch that the server makes of requests: raise it as memory and latency allow.
# Tensors have a first dimension for the batch, which dims below leave out.
"""
UNBATCHED = """\
# 0: requests are not batched, and dims below are whole shapes. If the first dimension of every
# tensor is a batch, write its largest size here and leave that dimension out of dims.
"""
TENSORS = "# -1 in dims is a dimension of any size.\n"
DYNAMIC = """\
# Requests that wait at the same time are executed as one batch. With a delay, a request may wait
# so long for others: more throughput, and more latency where there is little traffic.
dynamic_batching {
  # max_queue_delay_microseconds: 500
}
"""
INSTANCES = """\
# Copies of the model that work side by side: more of them fill a device that one leaves idle.
# KIND_AUTO is a GPU where there is one, else the CPU; KIND_GPU and KIND_CPU insist.
instance_group [
  {
    count: 1
    kind: KIND_AUTO
  }
]
"""
DECOUPLED = """\
# A request may have any number of responses.
model_transaction_policy {
  decoupled: true
}
"""
UNTOLD = """\
    # {note}: fill in both, such as
    # data_type: TYPE_FP32
    # dims: [ -1 ]
"""
NO_TENSORS = """\
# The file does not tell the {role}s of the model: list them here, such as
# {role} [
#   {{
#     name: "{example}"
#     data_type: TYPE_FP32
#     dims: [ -1 ]
#   }}
# ]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFile:
    """A model file (or a folder that is one), its platform and the name of its model.

    `folder` contains it; `home` is the model's folder, None outside a repository.
    """

    model: str
    folder: Path
    filename: str
    platform: Platform
    home: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDraft:
    """The text of a configuration and its path, None outside a repository."""

    text: str
    path: Path | None


def find_file(repository: ModelRepository, name: str) -> DraftFile:
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
    return DraftFile(
        model=name, folder=folder, filename=filename, platform=platform, home=entry.path
    )


def open_file(path: Path) -> DraftFile:
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
    return DraftFile(
        model=home.name if home else path.stem,
        folder=folder,
        filename=filename,
        platform=platform,
        home=home,
    )


def draft(file: DraftFile, backends: BackendLoader) -> ConfigDraft:
    """Draft a configuration from the backend's description; an existing config.pbtxt is ignored.

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
    return ConfigDraft(text=text, path=file.home / CONFIG_FILE if file.home else None)


def _candidates(names: Sequence[str]) -> Candidates:
    """The model files among the names: those with a default name, else those of its kind."""
    exact = [(each.filename, each) for each in PLATFORMS if each.filename in names]
    return exact or [
        (name, each)
        for name in sorted(names)
        for each in PLATFORMS
        if Path(name).suffix == Path(each.filename).suffix not in OF_ANY_CONTENT
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


def draft_text(description: Description, origin: str, filename: str) -> str:
    """The text of `config.pbtxt`; `origin` is the name of the model file.

    `filename` is not empty if the configuration must name the file.
    """
    return "\n".join(_parts(description, origin, filename))


def _parts(description: Description, origin: str, filename: str) -> Iterator[str]:
    """The paragraphs, each ending in a line feed."""
    config = description.config
    yield f"# Drafted from {origin} by `sluice config`.\n"
    yield _identity(config, filename)
    yield f"{BATCHED if config.batching else UNBATCHED}max_batch_size: {config.max_batch_size}\n"
    yield TENSORS + _tensors("input", config.input, description.notes)
    yield _tensors("output", config.output, description.notes)
    if config.dynamic_batching is not None:
        yield DYNAMIC
    if config.decoupled:
        yield DECOUPLED
    yield INSTANCES


def _identity(config: ModelConfig, filename: str) -> str:
    """The fields for the backend, the platform and the file."""

    lines = (
        ModelConfig(backend=config.backend),
        ModelConfig(platform=config.platform),
        ModelConfig(default_model_filename=filename),
    )
    return "".join(map(to_text, lines))


def _tensors(
    role: str,
    tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...],
    notes: Mapping[str, str],
) -> str:
    if not tensors:
        return NO_TENSORS.format(role=role, example=f"{role.upper()}__0")
    entries = ",\n".join(
        "  {\n" + _tensor(each, notes.get(each.name, "")) + "  }" for each in tensors
    )
    return f"{role} [\n{entries}\n]\n"


def _tensor(tensor: ModelInput | ModelOutput, note: str) -> str:
    name = to_text(ModelConfig(name=tensor.name)).strip()
    if tensor.data_type is DataType.TYPE_INVALID or not tensor.dims:
        return f"    {name}\n" + UNTOLD.format(note=note or "data_type and dims are unknown")
    lines = [name, f"data_type: {tensor.data_type}", f"dims: {_sizes(tensor.dims)}"]
    if note:
        lines[-1] += f"  # {note}"
    if tensor.reshape is not None:
        lines.append(f"reshape {{ shape: {_sizes(tensor.reshape.shape)} }}")
    lines += [f"{flag}: true" for flag in ("optional",) if getattr(tensor, flag, False)]
    return "".join(f"    {line}\n" for line in lines)


def _sizes(sizes: Any) -> str:
    return f"[ {', '.join(map(str, sizes))} ]" if sizes else "[ ]"
