"""Parameters of a model, and options of the backend, as Triton reads them."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors
from gateway.tensor_runtime.parameters import MOST_THREADS, instances_on_cpu, integer, switch

SIGNATURE = "TF_SIGNATURE_DEF"
TAG = "TF_GRAPH_TAG"
INTRA_THREADS = "TF_NUM_INTRA_THREADS"
INTER_THREADS = "TF_NUM_INTER_THREADS"
PER_SESSION = "TF_USE_PER_SESSION_THREADS"
SHARE_COUNT = "MAX_SESSION_SHARE_COUNT"
INIT_OPS_FILE = "TF_INIT_OPS_FILE"

SOFT_PLACEMENT = "allow-soft-placement"
MEMORY_FRACTION = "gpu-memory-fraction"

DEFAULT_TAG = "serve"
CALLERS_THREAD = -1
"""The library's number of threads between operations for the thread of the run."""
WORDS = {"yes": "true", "no": "false"}


@dataclass(frozen=True, slots=True)
class TensorFlowParameters:
    """The part of a SavedModel, the threads of a session, and the instances that share one.

    `signature` is empty for the default one, `init_ops_file` without initialisation.
    `gpu_memory_fraction` is accepted for Triton's sake: sessions use no GPU.
    """

    tag: str
    signature: str
    intra_threads: int
    inter_threads: int
    share_count: int
    init_ops_file: str
    soft_placement: bool
    gpu_memory_fraction: float

    @classmethod
    def read(cls, config: ModelConfig, settings: Mapping[str, str]) -> "TensorFlowParameters":
        """The parameters of a config; InferenceError INVALID_ARG for an invalid value."""
        found = config.parameters
        share_count = integer(found, SHARE_COUNT, 1)
        if share_count <= 0:
            raise _refused(SHARE_COUNT, "positive", config)
        switch({PER_SESSION: _boolean(found.get(PER_SESSION, "true"))}, PER_SESSION, default=True)
        share = _threads_of_session(config, share_count)
        return cls(
            found.get(TAG, "") or DEFAULT_TAG,
            found.get(SIGNATURE, ""),
            _threads(config, INTRA_THREADS) or share,
            _inter_threads(_threads(config, INTER_THREADS) or share),
            share_count,
            found.get(INIT_OPS_FILE, ""),
            switch(settings, SOFT_PLACEMENT, default=True),
            _fraction(settings),
        )


def _threads_of_session(config: ModelConfig, share_count: int) -> int:
    """The threads of one session if all sessions of the model share the cores; at least 1."""
    sessions = -(-instances_on_cpu(config) // share_count)
    return max(1, processors() // sessions)


def _inter_threads(count: int) -> int:
    """A pool of one thread only adds switches to the instance's thread."""
    return count if count > 1 else CALLERS_THREAD


def _threads(config: ModelConfig, key: str) -> int:
    found = integer(config.parameters, key)
    if found < 0:
        raise _refused(key, "non-negative", config)
    if found > MOST_THREADS:
        raise InferenceError(
            Code.INVALID_ARG,
            f"parameter '{key}' of model '{config.name}' is {found}, expected at most "
            f"{MOST_THREADS}",
        )
    return found


def _refused(key: str, expected: str, config: ModelConfig) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"parameter '{key}' must be {expected} number for TensorFlow model '{config.name}'",
    )


def _boolean(text: str) -> str:
    return WORDS.get(text.strip().lower(), text)


def _fraction(settings: Mapping[str, str]) -> float:
    text = settings.get(MEMORY_FRACTION, "0")
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise InferenceError(
            Code.INVALID_ARG,
            f"--backend-config=tensorflow,{MEMORY_FRACTION} is '{text}', expected a number from 0 "
            "to 1",
        )
    return found
