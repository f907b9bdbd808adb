"""The GPUs of an engine of vLLM, as the `model.json` of its version folder spreads it."""

import math
from collections.abc import Callable
from operator import mul
from pathlib import Path
from typing import Any

import orjson

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.replicas import EngineSpread
from gateway.models.repository import ModelEntry

BACKEND, FILE = "vllm", "model.json"
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
EXECUTOR, RAY = "distributed_executor_backend", "ray"
ENGINES = "data_parallel_size"


def engine_file(entry: ModelEntry, version: int) -> bytes | None:
    """The `model.json` of a version, None if it is missing; INVALID_ARG if it is unreadable."""
    try:
        return (entry.path / _path(version)).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _invalid(entry, _path(version), f"cannot be read: {error.strerror}") from None


def engine_spread(
    config: ModelConfig,
    entry: ModelEntry,
    read: Callable[[ModelEntry, int], bytes | None] = engine_file,
) -> EngineSpread:
    """The GPUs of the engines of a model, one for each version that its policy picks.

    A file that is missing spreads nothing: the load has an error. INVALID_ARG for one that is no
    JSON object, and for several versions or engines if Ray has the workers of one.
    """
    if config.backend != BACKEND:
        return EngineSpread()
    versions = entry.versions(config.version_policy)
    found = [_arguments(entry, version, read(entry, version)) for version in versions]
    sizes = [math.prod(map(_size, map(each.get, SIZES))) for each in found]
    engines = [_size(each.get(ENGINES)) for each in found]
    if all(each.get(EXECUTOR) != RAY for each in found):
        gpus = list(map(mul, sizes, engines))
        return EngineSpread(sum(gpus) if any(each > 1 for each in gpus) else 0)
    if len(found) > 1:
        text = (
            f"model '{entry.name}': its policy picks {len(found)} versions, expected one, because "
            f"its {FILE} has '{EXECUTOR}' '{RAY}': a replica has the GPUs of one engine"
        )
        raise InferenceError(Code.INVALID_ARG, text)
    if engines[0] > 1:
        reason = (
            f"has '{ENGINES}' {engines[0]}, expected 1 with '{EXECUTOR}' '{RAY}', because a "
            "replica has one engine: set `replicas` to more"
        )
        raise _invalid(entry, _path(versions[0]), reason)
    return EngineSpread(sizes[0], by_ray=True)


def _arguments(entry: ModelEntry, version: int, content: bytes | None) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _invalid(entry, _path(version), f"is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise _invalid(entry, _path(version), "must be a JSON object of engine arguments")
    return found


def _path(version: int) -> Path:
    return Path(str(version)) / FILE


def _size(value: object) -> int:
    return value if isinstance(value, int) and value > 1 else 1


def _invalid(entry: ModelEntry, path: Path, reason: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"model '{entry.name}': its {path} {reason}")
