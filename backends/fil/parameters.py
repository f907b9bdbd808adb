"""Parameters of a forest, as Triton's FIL backend reads them."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.parameters import MOST_THREADS, thread_share

log = logging.getLogger("sluice.fil")

CLASSIFIES = "is_classifier"
OLD_CLASSIFIES = "output_class"
PROBABILITIES = "predict_proba"
THRESHOLD = "threshold"
THREADS = "cpu_nthread"
SWITCHES = (
    CLASSIFIES,
    OLD_CLASSIFIES,
    PROBABILITIES,
    "xgboost_allow_unknown_field",
    "use_experimental_optimizations",
)
SIZES = (THREADS, "chunk_size", "transfer_threshold")
USUAL_THRESHOLD = 0.5

LAYOUT = "Use `layout` instead."
CHUNK_SIZE = "Use `chunk_size` instead."
REMOVED = {
    "algo": LAYOUT,
    "threads_per_tree": CHUNK_SIZE,
    "storage_type": "",
    "blocks_per_sm": "",
}
"""Parameters that Triton's backend no longer has, and its advice."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class FilParameters:
    """The answers of a forest and its threads; `classifies` is None if the file decides."""

    classifies: bool | None
    probabilities: bool
    threshold: float
    threads: int

    @classmethod
    def read(cls, config: ModelConfig) -> "FilParameters":
        """The parameters of a config; InferenceError with Triton's text for an invalid value."""
        found = {key: value.strip() for key, value in config.parameters.items()}
        switches = {key: _switch(found, key) for key in SWITCHES if key in found}
        sizes = {key: _number(found, key, int) for key in SIZES if key in found}
        threshold = _number(found, THRESHOLD, float) if THRESHOLD in found else USUAL_THRESHOLD
        threads = sizes.get(THREADS, 0)
        if threads > MOST_THREADS:
            raise _bad(f"{THREADS}: found {threads}, expected at most {MOST_THREADS}")
        return cls(
            switches.get(CLASSIFIES, switches.get(OLD_CLASSIFIES)),
            switches.get(PROBABILITIES, False),
            threshold,
            threads if threads > 0 else thread_share(config),
        )


def warn_of_removed(config: ModelConfig) -> None:
    """Log the parameters without effect, in Triton's words."""
    for key, advice in REMOVED.items():
        if key in config.parameters:
            text = f"The `{key}` parameter has been removed in 25.09 release. {advice}".strip()
            log.warning(text, extra={"model": config.name})
    if "use_experimental_optimizations" in config.parameters:
        log.warning(
            "The `use_experimental_optimizations` parameter is deprecated and has no effect.",
            extra={"model": config.name},
        )


def _switch(found: Mapping[str, str], key: str) -> bool:
    if found[key] not in ("true", "false"):
        raise InferenceError(
            Code.INTERNAL, f"Expected 'true' or 'false' for parameter '{key}', got: '{found[key]}'"
        )
    return found[key] == "true"


def _number(found: Mapping[str, str], key: str, kind: Callable[[str], Number]) -> Number:
    try:
        value = kind(found[key])
    except ValueError:
        raise _bad(key) from None
    if isinstance(value, float) and math.isnan(value):
        raise _bad(key)
    return value


def _bad(what: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"Bad input for parameter {what}")
