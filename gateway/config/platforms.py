"""The backend of a model whose configuration does not name one.

The configuration decides first, then the files of the model's first version. `files` has their
names; names of folders end in a slash.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

ENSEMBLE = "ensemble"
TENSORRT = "tensorrt_plan"
FOREST = "fil"


@dataclass(frozen=True, slots=True)
class Platform:
    """A kind of model: its backend, its default file, and the files that identify it."""

    backend: str
    name: str
    filename: str
    marks: tuple[str, ...]


PLATFORMS = (
    Platform(
        "tensorflow", "tensorflow_savedmodel", "model.savedmodel", marks=("model.savedmodel/",)
    ),
    Platform("tensorflow", "tensorflow_graphdef", "model.graphdef", marks=("model.graphdef",)),
    Platform("tensorrt", TENSORRT, "model.plan", marks=("model.plan",)),
    Platform("onnxruntime", "onnxruntime_onnx", "model.onnx", marks=("model.onnx", "model.onnx/")),
    Platform("openvino", "", "model.xml", marks=("model.xml",)),
    Platform("pytorch", "pytorch_libtorch", "model.pt", marks=("model.pt",)),
    Platform("pytorch", "torch_aoti", "model.pt2", marks=("model.pt2",)),
    Platform("sklearn", "", "model.skops", marks=("model.skops",)),
    Platform("sklearn", "", "model.joblib", marks=("model.joblib",)),
    Platform("sklearn", "", "model.pkl", marks=("model.pkl",)),
    Platform("sklearn", "", "model.pickle", marks=("model.pickle",)),
    Platform("python", "", "model.py", marks=("model.py",)),
    Platform(FOREST, "", "xgboost.json", marks=("xgboost.json",)),
    Platform(FOREST, "", "xgboost.ubj", marks=("xgboost.ubj",)),
    Platform(FOREST, "", "xgboost.model", marks=("xgboost.model",)),
    Platform(FOREST, "", "checkpoint.tl", marks=("checkpoint.tl",)),
    Platform(FOREST, "", "model.txt", marks=()),
)
"""The recognised kinds of models, in the order of the checks."""


def resolve_backend(config: ModelConfig, files: Set[str]) -> ModelConfig:
    """Fill in `backend`, `platform` and `default_model_filename`; the config must have a name.

    Raises INVALID_ARG if neither config, files nor name identify a backend.
    """
    if platform := _recognise(config, files):
        return replace(
            config,
            backend=config.backend or platform.backend,
            platform=config.platform or platform.name,
            default_model_filename=config.default_model_filename or platform.filename,
        )
    if config.backend or config.platform or config.default_model_filename:
        return config
    return _backend_of_name(config)


def accepted_platforms(backend: str) -> frozenset[str]:
    """The platforms a backend may be paired with; empty if it may be any."""
    return frozenset(each.name for each in PLATFORMS if each.backend == backend and each.name)


def _recognise(config: ModelConfig, files: Set[str]) -> Platform | None:
    candidates = [each for each in PLATFORMS if _may_be(each, config)]
    return _named(config, candidates) or _found(config, candidates, files)


def _may_be(platform: Platform, config: ModelConfig) -> bool:
    if not config.backend:
        return config.platform in ("", platform.name)
    fits = config.platform in ("", platform.name) or not platform.name
    return fits and config.backend == platform.backend


def _named(config: ModelConfig, candidates: Sequence[Platform]) -> Platform | None:
    """The candidate whose file or platform the config names."""
    for each in candidates:
        if config.default_model_filename == each.filename or config.platform == each.name != "":
            return each
    return None


def _found(config: ModelConfig, candidates: Sequence[Platform], files: Set[str]) -> Platform | None:
    """The candidate that the files identify, else the first one of a named backend.

    The backend of forests finds its file itself, by `model_type`.
    """
    if config.backend == FOREST:
        return None
    if not (config.platform or config.default_model_filename):
        for each in candidates:
            if not files.isdisjoint(each.marks):
                return each
    if config.backend in ("", "tensorflow"):
        return None
    return next(iter(candidates), None)


def _backend_of_name(config: ModelConfig) -> ModelConfig:
    _, dot, backend = config.name.partition(".")
    if not dot:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Invalid model name: Could not determine backend for model '{config.name}' with no "
            "backend in model configuration. Expected model name of the form "
            "'model.<backend_name>'.",
        )
    return replace(config, backend=backend, default_model_filename=f"model.{backend}")
