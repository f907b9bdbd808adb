"""Metadata, readiness and statistics of the v2 protocol, for all frontends."""

from collections.abc import Sequence
from typing import Any

from gateway import __version__
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.observability.statistics import statistics_row
from gateway.policy.caller import Caller

EXTENSIONS = (
    "classification",
    "sequence",
    "system_shared_memory",
    "cuda_shared_memory",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "generate",
    "rollout",
)
"""The v2 extensions that this release implements."""


def server_metadata(server_id: str) -> dict[str, Any]:
    """`GET /v2` and ServerMetadata."""
    return {"name": server_id, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(
    dataplane: DataPlane, name: str, version: str, caller: Caller | None = None
) -> dict[str, Any]:
    """Metadata of one version, or of the highest with the list of all ready ones.

    Raises InferenceError with the lookup texts.
    """
    name, version = dataplane.address(name, version, caller)
    model = dataplane.model(name, version, caller)
    ready = [each.version for each in dataplane.ready_versions(name)]
    config = model.config
    return {
        "name": name,
        "versions": [model.version] if version else ready,
        "platform": config.platform or config.backend,
        "inputs": _tensors(config, config.input),
        "outputs": _tensors(config, config.output),
    }


def statistics(dataplane: DataPlane, name: str, version: str) -> list[dict[str, Any]]:
    """Rows of the requested ready versions; `name` "" requests all models.

    Raises INVALID_ARG for an unknown model or version, as Triton.
    """
    name, version = dataplane.address(name, version)
    if dataplane.has_label(name, version):
        version = dataplane.model(name, version).version
    ready = [each for each in dataplane.models() if each.ready]
    found = [each for each in ready if name in ("", each.name)]
    if name and not found:
        raise InferenceError(Code.INVALID_ARG, f"requested model '{name}' is not available")
    chosen = [each for each in found if version in ("", each.version)]
    if version and not chosen:
        raise _no_version(dataplane, name, version)
    return [statistics_row(each.name, each.version, each.statistics) for each in chosen]


def _no_version(dataplane: DataPlane, name: str, version: str) -> InferenceError:
    try:
        dataplane.model(name, version)
    except InferenceError as error:
        if error.code is Code.INVALID_ARG:
            return error
    return InferenceError(
        Code.INVALID_ARG, f"requested model version is not available for model '{name}'"
    )


def model_ready(dataplane: DataPlane, name: str, version: str) -> bool:
    """Whether that version (or any, for "") can serve; False for unknown models.

    Raises INVALID_ARG for a version that is no number.
    """
    try:
        return dataplane.model(name, version).ready
    except InferenceError as error:
        if error.code is Code.INVALID_ARG:
            raise
        return False


async def check_model_ready(dataplane: DataPlane, name: str, version: str) -> bool:
    """`model_ready`, and the readiness check of the model itself."""
    if not model_ready(dataplane, name, version):
        return False
    try:
        await dataplane.model(name, version).check_ready()
    except InferenceError:
        return False
    return True


def _tensors(
    config: ModelConfig, tensors: Sequence[ModelInput | ModelOutput]
) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "datatype": each.datatype.value,
            "shape": list(config.wire_shape(each)),
        }
        for each in tensors
    ]
