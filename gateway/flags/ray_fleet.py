"""Options of `sluice serve --fleet ray`: those that its replicas get, too."""

import argparse
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gateway.errors import Code, InferenceError
from gateway.flags.tls import PEM_FILES
from gateway.settings import ControlMode

NAME = re.compile(r"[\w.-]+", re.ASCII)
PATHS = (
    *("model-store-path", "backend-directory", "fleet-secret-file"),
    *(f"fleet-{each}" for each in PEM_FILES),
)
"""Options with paths, which have to be those of every node."""
VALUES = (
    *("model-config-name", "model-load-thread-count", "model-load-retry-count"),
    *("fleet-name", "stall-secs", "exit-timeout-secs", "rate-limit", "golden"),
)
"""Options whose values are as they were written."""
ALONE = "a replica has one model"
REFUSED = {
    "model_control_mode": (ControlMode.NONE, "replicas host every model of the repository"),
    "model_namespacing": (False, "a model has its replicas by its name alone"),
    "exit_on_error": (True, "a replica ends if its model fails to load"),
    "host_policy": ([], "cores are those of one machine"),
    "on_demand": (False, "models without requests have no replica if their 'replicas' begin at 0"),
    "model_memory": (None, ALONE),
    "gpu_memory": ([], ALONE),
    "max_resident_models": (0, ALONE),
}
"""Options that cannot be those of replicas: the value without them, and the reason."""


def replica_options(flags: argparse.Namespace) -> tuple[str, ...]:
    """The options of the replicas of a fleet on Ray, from the parsed ones of its router.

    UNSUPPORTED without Ray, INVALID_ARG for options that such a fleet cannot have.
    """
    require_ray()
    if not NAME.fullmatch(flags.fleet_name):
        raise _invalid(
            f"--fleet-name is '{flags.fleet_name}', expected letters, digits, '_', '.' and '-' "
            "with --fleet ray"
        )
    for name, (usual, reason) in REFUSED.items():
        if getattr(flags, name) != usual:
            option = name.replace("_", "-")
            raise _invalid(f"--{option} has no effect with --fleet ray: {reason}")
    return tuple(_options(flags))


def require_ray() -> None:
    """Raise UNSUPPORTED without Ray."""
    if find_spec("ray") is None:
        raise InferenceError(
            Code.UNSUPPORTED, "a fleet on Ray needs the package ray: pip install 'sluice[fleet]'"
        )


def _options(flags: argparse.Namespace) -> Iterator[str]:
    given = {name: getattr(flags, name.replace("-", "_")) for name in (*PATHS, *VALUES)}
    yield from map(_repository, flags.model_repository)
    for name in PATHS:
        if given[name]:
            yield f"--{name}={Path(given[name]).absolute()}"
    for name in VALUES:
        if given[name]:
            yield f"--{name}={given[name]}"
    for backend, key, value in flags.backend_config:
        yield f"--backend-config={backend}{',' if backend else ''}{key}={value}"
    for limit in flags.rate_limit_resource:
        device = "" if limit.device is None else f":{limit.device}"
        yield f"--rate-limit-resource={limit.name}:{limit.count}{device}"
    for gpu, part in flags.model_load_gpu_limit:
        yield f"--model-load-gpu-limit={gpu}:{part:f}"
    yield "--min-supported-compute-capability={}.{}".format(*flags.min_supported_compute_capability)
    if flags.disable_auto_complete_config or flags.strict_model_config:
        yield "--disable-auto-complete-config"


def _repository(place: Path | str) -> str:
    if isinstance(place, str):
        raise _invalid(f"--model-repository is '{place}', expected a folder with --fleet ray")
    return f"--model-repository={place.absolute()}"


def _invalid(text: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, text)
