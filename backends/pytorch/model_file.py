"""The model's file, its kind by the content of its archive, and failures of PyTorch in one line."""

import pickle
import re
import struct
import zipfile
import zlib
from enum import Enum
from pathlib import Path

import torch

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

FAILURES = (
    RuntimeError,
    torch.jit.Error,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    OSError,
    EOFError,
    ImportError,
    SyntaxError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions of loading or running a model, whose code is foreign."""

LONGEST = 1000

_STACK = re.compile(r"\n(?:Exception raised from|frame #\d+:|C\+\+ CapturedTraceback)")
_RAISED = re.compile(r"^(?:[\w.]*\.)?\w*(?:Error|Exception)\w*: ", re.MULTILINE)
_PATH = re.compile(r"(?<![\w.])(?:/[^\s/:'\"]+)+/([^\s/:'\"]+)")

DEFAULT_NAMES = {"torch_aoti": "model.pt2"}
LIBTORCH_NAME = "model.pt"


def reason(error: BaseException) -> str:
    """The reason of an error, without traceback, C++ stack and folders of paths."""
    text = _STACK.split(str(error), maxsplit=1)[0]
    if "Traceback of TorchScript" in text:
        text = _raised(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = "; ".join(lines[:3]) or type(error).__name__
    return _PATH.sub(r"\1", shown)[:LONGEST]


def _raised(text: str) -> str:
    """The text after TorchScript's traceback, which ends with `<name of the error>: <text>`."""
    found = list(_RAISED.finditer(text))
    return text[found[-1].end() :] if found else text.strip().splitlines()[-1]


def load_failure(config: ModelConfig, error: BaseException) -> InferenceError:
    """The error of a file that PyTorch refuses, in Triton's words."""
    return InferenceError(Code.INTERNAL, f"failed to load model '{config.name}': {reason(error)}")


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
