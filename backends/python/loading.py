"""Loading of a model: limits of its worker, messages, and the identity of its code."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.backend import ModelContext
from gateway.config import ModelConfig
from gateway.config.pbtxt import parse_json, to_json
from gateway.errors import Code, InferenceError

STUB_TIMEOUT = "stub-timeout-seconds"
DEFAULT_STUB_TIMEOUT_SECS = 30
SMALLEST_REGION = 1 << 20
FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"
SPECIAL = re.compile(r"[;|&$`<>()\[\]{}\\\"'*?~#!]")
MAX_SECS = 1e9

DEFAULT_FILE = "model.py"
STORED_MODEL = "stored_model"
"""A parameter of a model; in the args of `initialize` it is the folder of that stored model."""
FIRST_VERSION = 1


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


def version_of(path: Path) -> int:
    """The number of a version by its folder; a model of the store has only one."""
    return int(path.name) if path.name.isdecimal() else FIRST_VERSION


def instance_name(context: ModelContext) -> str:
    """The instance's name in errors and log lines."""
    return context.name or f"{context.config.name}_0"


def load_message(context: ModelContext, home: Path | None) -> dict[str, Any]:
    """The content of LOAD; `home` is the folder of a Python-based backend."""
    path = context.path.absolute()
    return {
        "args": {
            **_stored(context),
            "model_config": config_json(context.config),
            "model_instance_kind": context.group.kind.removeprefix("KIND_"),
            "model_instance_name": instance_name(context),
            "model_instance_device_id": str(context.device),
            "model_repository": str(path.parent),
            "model_version": str(version_of(path)),
            "model_name": context.config.name,
        },
        "path": str(path),
        "backend_path": "" if home is None else str(home.absolute()),
        "decoupled": context.config.decoupled,
    }


def _stored(context: ModelContext) -> dict[str, str]:
    """The folder of the stored model that the config names; the gateway has checked it."""
    name = context.config.parameters.get(STORED_MODEL)
    return {} if name is None else {STORED_MODEL: str(context.store.absolute() / name)}


def code_identity(config: ModelConfig, path: Path, home: Path | None) -> bytes:
    """An identity of the state of a model's code."""
    file = home / DEFAULT_FILE if home else path / (config.default_model_filename or DEFAULT_FILE)
    changed = file.stat().st_mtime_ns if file.exists() else 0
    return hashlib.blake2b(repr((config.name, str(file), changed)).encode()).digest()


def config_json(config: ModelConfig) -> str:
    """A config in the JSON form of the model configuration extension."""
    return orjson.dumps(to_json(config)).decode()


def complete_message(config: ModelConfig, path: Path, home: Path | None) -> dict[str, Any]:
    """The content of COMPLETE; `home` is the folder of a Python-based backend."""
    return {
        "model_config": config_json(config),
        "model_name": config.name,
        "path": str(path.absolute()),
        "backend_path": "" if home is None else str(home.absolute()),
    }


def completed_config(config: ModelConfig, said: str | None) -> ModelConfig:
    """The config that the model has completed; `said` is None if it completes nothing."""
    if said is None:
        return config
    try:
        return parse_json(said)
    except InferenceError as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"auto_complete_config function in model '{config.name}' returned no model "
            f"configuration: {error.message}",
        ) from None
