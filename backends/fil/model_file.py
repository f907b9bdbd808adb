"""The file of a forest: its place, its format, and the library that reads it."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import lightgbm
import treelite
import xgboost

from backends.fil.forests import Forest, LightgbmForest, TreeliteForest, XgboostForest
from backends.fil.whole_files import (
    JSON_BEGIN,
    is_ubjson,
    is_whole_lightgbm,
    require_whole_ubjson,
)
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.failures import ClearFailures
from gateway.tensor_runtime.model_files import file_below, find_file

MODEL_TYPE = "model_type"
XGBOOST = "xgboost"
LIGHTGBM = "lightgbm"
CHECKPOINT = "treelite_checkpoint"
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

OLD_XGBOOST_BEGIN = b"binf"
LIGHTGBM_BEGIN = b"tree"

ERRORS = (
    xgboost.core.XGBoostError,
    lightgbm.basic.LightGBMError,
    treelite.TreeliteError,
    ValueError,
    TypeError,
    KeyError,
    OSError,
    RuntimeError,
    MemoryError,
)
"""The libraries' exceptions, also Python's own."""
PLACE = re.compile(r"\[\d+:\d+:\d+\] |\S+\.(?:cc|h|cpp|hpp|cu):\d+:?")
"""The time, and a place in C++ sources, which begin texts of XGBoost and treelite."""
STACK = "Stack trace:"


def clear_failures(folder: Path, what: str, where: str) -> ClearFailures:
    """A context for calls of the libraries; `where` begins the reason."""
    return ClearFailures(folder, what, ERRORS, lambda text: f"{where}: {_reason(text)}")


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
    library, read = _reader(kind, file, data)
    reading = f"'{shown}' is cut short, or of a format that {library} does not read"
    with clear_failures(folder, what, reading):
        if is_ubjson(data):
            require_whole_ubjson(data)
        return read(threads)


def _kind(configured: str, file: Path, data: bytes) -> str:
    """The format of a file, which its content and name tell if the config does not.

    A file that begins with `{` is of XGBoost in any case.
    """
    if data.startswith(JSON_BEGIN):
        return XGBOOST
    if configured:
        return configured
    if data.startswith(LIGHTGBM_BEGIN):
        return LIGHTGBM
    return CHECKPOINT if file.suffix == ".tl" else XGBOOST


def _problem(kind: str, data: bytes) -> str:
    """A difference that a library would not report, or report unclearly."""
    if kind == LIGHTGBM and not data.startswith(LIGHTGBM_BEGIN):
        return "no model of LightGBM: expected a text that begins with 'tree'"
    if kind == LIGHTGBM and not is_whole_lightgbm(data):
        return "cut short: expected trees of LightGBM of the sizes in 'tree_sizes'"
    if kind.startswith(XGBOOST) and not data.startswith((JSON_BEGIN, OLD_XGBOOST_BEGIN)):
        return (
            "no model of XGBoost: expected JSON or UBJSON, which begin with '{', or an old binary, "
            "which begins with 'binf'"
        )
    return ""


def _reader(kind: str, file: Path, data: bytes) -> tuple[str, Callable[[int], Forest]]:
    """The library that reads a file, and a function to read it for a number of threads."""
    if kind == LIGHTGBM:
        name = f"LightGBM {lightgbm.__version__}"
        return name, lambda threads: LightgbmForest(data, threads)
    if kind == CHECKPOINT:
        name = f"treelite {treelite.__version__}"
        return name, lambda threads: TreeliteForest(treelite.Model.deserialize_bytes(data), threads)
    if data.startswith(OLD_XGBOOST_BEGIN):
        name = f"treelite {treelite.__version__}"
        return name, lambda threads: TreeliteForest(
            treelite.frontend.load_xgboost_model_legacy_binary(str(file)), threads
        )
    return f"XGBoost {xgboost.__version__}", lambda threads: XgboostForest(data, threads)
