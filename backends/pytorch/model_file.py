"""The model's file, and its kind by the content of its archive."""

import zipfile
from enum import Enum
from pathlib import Path

from backends.pytorch.failures import reason
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

DEFAULT_NAMES = {"torch_aoti": "model.pt2"}
LIBTORCH_NAME = "model.pt"


class FileKind(Enum):
    """Kinds of files, by the function that writes them."""

    TORCHSCRIPT = "TorchScript of torch.jit.save"
    TRACED = "TorchScript that was traced"
    EXPORTED = "a program of torch.export.save"
    INDUCTOR = "a package of AOTInductor"


def model_file(config: ModelConfig, folder: Path) -> Path:
    """The model's file in its version folder; UNAVAILABLE if it is missing."""
    name = config.default_model_filename or DEFAULT_NAMES.get(config.platform, LIBTORCH_NAME)
    path = folder / name
    if name.startswith("/") or ".." in Path(name).parts:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{config.name}': default_model_filename is '{name}', expected a file in "
            "the folder of the version",
        )
    if not path.is_file():
        raise InferenceError(
            Code.UNAVAILABLE,
            f"unable to find '{folder.name}/{name}' for model instance '{config.name}'",
        )
    return path


def kind_of(path: Path) -> FileKind:
    """The kind of a file, by the names in its archive; INVALID_ARG if it is unknown."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError) as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"'{path.name}' is no archive of PyTorch, or cut short: {reason(error)}; expected a "
            "file of torch.jit.save, torch.export.save or aoti_compile_and_package",
        ) from None
    return _kind(path.name, names)


def _kind(file: str, names: list[str]) -> FileKind:
    if any(name.startswith("data/aotinductor/") for name in names):
        return FileKind.INDUCTOR
    if any(name.startswith("models/") for name in names):
        return FileKind.EXPORTED
    if "constants.pkl" in names:
        return FileKind.TRACED if "traced_inputs.pkl" in names else FileKind.TORCHSCRIPT
    held = "a pickle of torch.save" if "data.pkl" in names else "no model"
    raise InferenceError(
        Code.INVALID_ARG,
        f"'{file}' holds {held}; expected a file of torch.jit.save, torch.export.save or "
        "aoti_compile_and_package",
    )
