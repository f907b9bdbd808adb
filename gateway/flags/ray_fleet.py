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
VALUES = ("model-config-name", "fleet-name", "stall-secs", "exit-timeout-secs", "rate-limit")
"""Options whose values are as they were written."""


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
    if flags.model_control_mode != ControlMode.NONE:
        raise _invalid(
            "--model-control-mode has no effect with --fleet ray, whose replicas host every model "
            "of the repository"
        )
    return tuple(_options(flags))


def require_ray() -> None:
    """Raise UNSUPPORTED without Ray."""
    if find_spec("ray") is None:
        raise InferenceError(
            Code.UNSUPPORTED, "a fleet on Ray needs the package ray: pip install 'sluice[fleet]'"
        )


def _options(flags: argparse.Namespace) -> Iterator[str]:
    given = {name: getattr(flags, name.replace("-", "_")) for name in (*PATHS, *VALUES)}
    for path in flags.model_repository:
        yield f"--model-repository={path.absolute()}"
    for name in PATHS:
        if given[name]:
            yield f"--{name}={Path(given[name]).absolute()}"
    for name in VALUES:
        if given[name]:
            yield f"--{name}={given[name]}"
    for backend, key, value in flags.backend_config:
        yield f"--backend-config={backend}{',' if backend else ''}{key}={value}"
    if flags.disable_auto_complete_config:
        yield "--disable-auto-complete-config"


def _invalid(text: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, text)
