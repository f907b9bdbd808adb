"""The file of a forest: its place, its format, and the library that reads it."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from backends.fil.forests import Errors, Forest, ForestLibrary
from backends.fil.lightgbm_text import problem_of_lightgbm
from backends.fil.ubjson import JSON_BEGIN, is_ubjson, require_whole_ubjson
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, failed_import
from gateway.tensor_runtime.failures import ClearFailures
from gateway.tensor_runtime.model_files import file_below, find_file
from gateway.threads import IMPORTING

MODEL_TYPE = "model_type"
XGBOOST = "xgboost"
LIGHTGBM = "lightgbm"
CHECKPOINT = "treelite_checkpoint"
OLD_BINARY = "xgboost_binary"
"""The format of XGBoost's old binaries, which no `model_type` names."""
OTHER_XGBOOST = ("model.json", "model.ubj", "model.bst")
"""Names of other servers."""
FILES = {
    XGBOOST: ("xgboost.model", *OTHER_XGBOOST),
    "xgboost_json": ("xgboost.json", *OTHER_XGBOOST),
    "xgboost_ubj": ("xgboost.ubj", *OTHER_XGBOOST),
    LIGHTGBM: ("model.txt",),
    CHECKPOINT: ("checkpoint.tl",),
}
"""The names of a file by `model_type`, Triton's first."""

LIBRARIES = {LIGHTGBM: "LightGBM", CHECKPOINT: "treelite", OLD_BINARY: "treelite"}
"""The libraries of formats; the others are XGBoost's."""

OLD_XGBOOST_BEGIN = b"binf"
LIGHTGBM_BEGIN = b"tree"

ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    OSError,
    RuntimeError,
    MemoryError,
)
"""Exceptions of Python that the libraries raise, too."""
PLACE = re.compile(r"\[\d+:\d+:\d+\] |\S+\.(?:cc|h|cpp|hpp|cu):\d+:?")
"""The time, and a place in C++ sources, which begin texts of XGBoost and treelite."""
STACK = "Stack trace:"


def clear_failures(folder: Path, what: str, where: str, errors: Errors = ()) -> ClearFailures:
    """A context for calls of a library with these exceptions; `where` begins the reason."""
    return ClearFailures(folder, what, (*errors, *ERRORS), lambda text: f"{where}: {_reason(text)}")


def _reason(text: str) -> str:
    return PLACE.sub("", text.partition(STACK)[0])


def model_type(config: ModelConfig) -> str:
    """The configured format, empty if there is none; UNSUPPORTED, as Triton, for an unknown one."""
    found = config.parameters.get(MODEL_TYPE, "").strip()
    if found and found not in FILES:
        raise InferenceError(
            Code.UNSUPPORTED, f"{found} not recognized as a valid serialization format."
        )
    return found


def find_model(config: ModelConfig, folder: Path) -> Path:
    """The file of a forest: the one that the config names, or the first with a usual name.

    Raises InferenceError UNAVAILABLE if it is missing, and INVALID_ARG for a name outside of the
    version folder.
    """
    names = list(_usual_names(model_type(config)))
    if not config.default_model_filename:
        for name in names:
            if (file := file_below(folder, folder, name, config)).is_file():
                return file
    return find_file(config, folder, names[0])


def _usual_names(kind: str) -> Iterator[str]:
    for each in (kind,) if kind else FILES:
        yield from FILES[each]


def read_forest(config: ModelConfig, folder: Path, threads: int) -> Forest:
    """The forest in the file; InferenceError if no library reads it."""
    file = find_model(config, folder)
    shown = f"{folder.name}/{file.relative_to(folder)}"
    what = f"unable to load model '{config.name}'"
    with clear_failures(folder, what, f"'{shown}' cannot be read"):
        data = file.read_bytes()
    kind = _kind(model_type(config), file, data)
    if problem := _problem(kind, data):
        raise InferenceError(Code.INVALID_ARG, f"{what}: '{shown}' is {problem}")
    library = _library(kind, what)
    reading = f"'{shown}' is cut short, or of a format that {library.name} does not read"
    with clear_failures(folder, what, reading, library.errors):
        if is_ubjson(data):
            require_whole_ubjson(data)
        return library.read(file, data, threads)


def _kind(configured: str, file: Path, data: bytes) -> str:
    """The format of a file, which its content and name tell if the config does not.

    A file that begins with `{` is of XGBoost in any case.
    """
    if data.startswith(JSON_BEGIN):
        return XGBOOST
    found = configured or _recognised(file, data)
    is_old = found.startswith(XGBOOST) and data.startswith(OLD_XGBOOST_BEGIN)
    return OLD_BINARY if is_old else found


def _recognised(file: Path, data: bytes) -> str:
    if data.startswith(LIGHTGBM_BEGIN):
        return LIGHTGBM
    return CHECKPOINT if file.suffix == ".tl" else XGBOOST


def _problem(kind: str, data: bytes) -> str:
    """A difference that a library would not report, or report unclearly."""
    if kind == LIGHTGBM and not data.startswith(LIGHTGBM_BEGIN):
        return "no model of LightGBM: expected a text that begins with 'tree'"
    if kind == LIGHTGBM:
        return problem_of_lightgbm(data)
    if kind.startswith(XGBOOST) and not data.startswith((JSON_BEGIN, OLD_XGBOOST_BEGIN)):
        return (
            "no model of XGBoost: expected JSON or UBJSON, which begin with '{', or an old binary, "
            "which begins with 'binf'"
        )
    return ""


def _library(kind: str, what: str) -> ForestLibrary:
    """The library that reads a format; it may be missing, or need one that the system lacks."""
    try:
        return _imported(kind)
    except (ImportError, OSError, ValueError) as error:  # ValueError: XGBoost's own
        name = LIBRARIES.get(kind, "XGBoost")
        raise failed_import(f"{what}: {name}", error, "pip install 'sluice[fil]'") from error


@cache
def _imported(kind: str) -> ForestLibrary:
    """The same, imported with the first model of the format."""
    with IMPORTING:
        if kind == LIGHTGBM:
            from backends.fil.lightgbm_forest import LIGHTGBM as library
        elif kind == CHECKPOINT:
            from backends.fil.treelite_forest import CHECKPOINTS as library
        elif kind == OLD_BINARY:
            from backends.fil.treelite_forest import OLD_BINARIES as library
        else:
            from backends.fil.xgboost_forest import XGBOOST as library
    return library
