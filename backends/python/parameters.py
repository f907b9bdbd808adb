"""Limits of workers, from a model's config and from `--backend-config=python`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

STUB_TIMEOUT = "stub-timeout-seconds"
DEFAULT_STUB_TIMEOUT_SECS = 30
SMALLEST_REGION = 1 << 20
FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"
SPECIAL = re.compile(r"[;|&$`<>()\[\]{}\\\"'*?~#!]")
MAX_SECS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Of one model: seconds, 0 for no limit; and megabytes of private memory, 0 for no limit.

    `initialize_timeout_secs`: longest start of a model in its worker. `execute_timeout_secs`:
    longest execution. `abandoned_execute_secs`: longest execution after its clients have
    disconnected. `health_check_secs`: interval of pings; after three without an answer the worker
    is killed.
    """

    initialize_timeout_secs: float = 3600
    execute_timeout_secs: float = 0
    abandoned_execute_secs: float = 30
    worker_memory_limit_mb: int = 0
    health_check_secs: float = 5

    @classmethod
    def read(cls, config: ModelConfig) -> "WorkerLimits":
        """The limits of a config; InferenceError names an invalid value."""
        forced = config.parameters.get(FORCE_CPU, "yes")
        if forced not in ("yes", "no"):
            raise InferenceError(Code.UNSUPPORTED, f"Incorrect value for {FORCE_CPU}: {forced}'")
        return cls(
            initialize_timeout_secs=_number(config, "initialize_timeout_secs", 3600),
            execute_timeout_secs=_number(config, "execute_timeout_secs", 0),
            abandoned_execute_secs=_number(config, "abandoned_execute_secs", 30),
            worker_memory_limit_mb=int(_number(config, "worker_memory_limit_mb", 0)),
            health_check_secs=_number(config, "health_check_secs", 5),
        )


def stub_timeout_secs(settings: Mapping[str, str]) -> int:
    """Longest start of a worker; INVALID_ARG for settings that Triton refuses.

    The settings for Triton's shared memory and threads are checked and have no effect
    (python backend, configuration knobs).
    """
    if _setting(settings, "shm-default-byte-size", SMALLEST_REGION) < SMALLEST_REGION:
        raise _refused("shm-default-byte-size can't be smaller than 4 MiBs")
    if _setting(settings, "shm-growth-byte-size", SMALLEST_REGION) <= 0:
        raise _refused("shm-growth-byte-size can't be smaller than or equal to zero.")
    if not settings.get("shm-region-prefix-name", "default"):
        raise _refused("shm-region-prefix-name must at least contain one character.")
    if _setting(settings, "thread-pool-size", 32) < 1:
        raise _refused("thread-pool-size can't be less than 1.")
    timeout = _setting(settings, STUB_TIMEOUT, DEFAULT_STUB_TIMEOUT_SECS)
    if timeout <= 0:
        raise _refused(f"{STUB_TIMEOUT} can't be smaller than or equal to zero.")
    return timeout


def refuse_special_name(name: str) -> None:
    """Raise INVALID_ARG for the name of an instance that Triton refuses."""
    if SPECIAL.search(name):
        raise _refused(f"Invalid stub name: contains invalid characters: '{name}'")


def _number(config: ModelConfig, key: str, default: float) -> float:
    text = config.parameters.get(key, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= MAX_SECS:
        raise _refused(
            f"model '{config.name}': parameter '{key}' is '{text}', expected a number from 0 "
            f"to {MAX_SECS:g}"
        )
    return value


def _setting(settings: Mapping[str, str], key: str, default: int) -> int:
    text = settings.get(key, str(default))
    try:
        return int(text)
    except ValueError:
        raise _refused(f"--backend-config=python,{key} is '{text}', expected an integer") from None


def _refused(message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, message)
