"""Options of models: repositories, loads, configurations, backends and the rate limiter."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.errors import Code, InferenceError
from gateway.flags import remote
from gateway.flags.devices import add_host_policy, host_policies
from gateway.flags.memory import add_memory_flags, memory_budget
from gateway.flags.values import add_truth, count, natural, seconds, truth
from gateway.settings import (
    ENVIRONMENT,
    EVERY_MODEL,
    MODEL_NAME,
    ControlMode,
    GoldenMode,
    ModelSettings,
    ResourceLimit,
)
from gateway.storage.store import default_root

log = logging.getLogger("sluice.flags")

RATE_LIMITS = ("off", "execution_count")


def backend_setting(text: str) -> tuple[str, str, str]:
    """`BACKEND,KEY=VALUE` of --backend-config, or `KEY=VALUE`, which holds for every backend."""
    backend, comma, rest = text.partition(",")
    key, equals, value = rest.partition("=") if comma else backend.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(
            f"--backend-config option format is '<backend name>,<setting>=<value>'. Got {text}"
        )
    return backend if comma else "", key, value


def resource_limit(text: str) -> ResourceLimit:
    """`NAME:COUNT` or `NAME:COUNT:DEVICE` of --rate-limit-resource."""
    name, *numbers = text.split(":")
    whole = all(each.isascii() and each.isdigit() for each in numbers)
    if not (name and whole) or len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    return ResourceLimit(name, *map(int, numbers))


def model_settings(flags: argparse.Namespace) -> ModelSettings:
    """Settings from the parsed options; INVALID_ARG for conflicting options."""
    mode = ControlMode(flags.model_control_mode)
    return ModelSettings(
        repositories=tuple(
            remote.repository(each, flags, ENVIRONMENT) for each in flags.model_repository
        ),
        store=flags.model_store_path or default_root(ENVIRONMENT),
        config_name=flags.model_config_name,
        exit_on_error=flags.exit_on_error,
        strict_readiness=flags.strict_readiness,
        load_thread_count=flags.model_load_thread_count,
        load_retry_count=flags.model_load_retry_count,
        control_mode=mode,
        poll_secs=flags.repository_poll_secs,
        startup=_startup(flags.load_model, mode),
        auto_complete=_auto_complete(flags),
        namespacing=flags.model_namespacing,
        model_name=ENVIRONMENT.get(MODEL_NAME, ""),
        backends=_by_backend(flags.backend_config),
        backend_directory=_backend_directory(flags),
        rate_limit=flags.rate_limit == "execution_count",
        resource_limits=_smallest(flags.rate_limit_resource),
        stall_secs=flags.stall_secs,
        host_policies=host_policies(flags.host_policy),
        memory=memory_budget(flags),
        golden=GoldenMode(flags.golden),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group = parser.add_argument_group("models")
    _add_repository_flags(group)
    _add_control_flags(group)
    _add_config_flags(group)
    _add_rate_limit_flags(group)
    add_host_policy(group)
    add_memory_flags(group)
    group.add_argument(
        "--golden",
        choices=[each.value for each in GoldenMode],
        default=ModelSettings().golden.value,
        help="a golden request that fails: fails the load, is a warning, or none is executed "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--stall-secs",
        type=seconds,
        default=ModelSettings().stall_secs,
        metavar="SECS",
        help="restart an instance whose executions make no progress for this time; a long "
        "execution with progress is no error (seconds, default: never)",
    )


def _startup(names: Sequence[str], mode: ControlMode) -> tuple[str, ...]:
    if names and mode is not ControlMode.EXPLICIT:
        raise InferenceError(
            Code.INVALID_ARG,
            "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as "
            "well.",
        )
    if EVERY_MODEL in names and len(names) > 1:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Wildcard model name '{EVERY_MODEL}' must be the ONLY startup model if specified at "
            "all.",
        )
    return tuple(dict.fromkeys(names))


def _auto_complete(flags: argparse.Namespace) -> bool:
    if flags.strict_model_config is not None:
        log.warning(
            "'--strict-model-config' has been deprecated! Please use "
            "'--disable-auto-complete-config' instead."
        )
    return not (flags.disable_auto_complete_config or flags.strict_model_config)


def _by_backend(given: Sequence[tuple[str, str, str]]) -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for backend, key, value in given:
        found.setdefault(backend, {})[key] = value
    return found


def _backend_directory(flags: argparse.Namespace) -> Path | None:
    """The value of the option, or else of the global backend setting, as in Triton."""
    said: Path | None = flags.backend_directory
    for backend, key, value in flags.backend_config:
        if (backend, key) == ("", "backend-directory"):
            said = said or Path(value)
    return said


def _smallest(given: Sequence[ResourceLimit]) -> tuple[ResourceLimit, ...]:
    """The limits; a resource that is repeated for one device has the smaller count."""
    found: dict[tuple[str, int | None], ResourceLimit] = {}
    for each in sorted(given, key=lambda each: each.count):
        found.setdefault((each.name, each.device), each)
    return tuple(found.values())


def _add_repository_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        *("--model-repository", "--model-store"),
        action="append",
        type=remote.place,
        required=True,
        metavar="DIR",
        help="folder of models to serve, or its address in object storage (s3://, gs://, as://); "
        "repeatable",
    )
    remote.add_flags(group)
    group.add_argument(
        "--model-store-path",
        type=Path,
        metavar="DIR",
        help="folder of models that `sluice fetch` stores (default: the user's cache)",
    )
    add_truth(
        group, "--model-namespacing", False, "allow the same model name in several repositories"
    )


def _add_control_flags(group: "argparse._ArgumentGroup") -> None:
    defaults = ModelSettings()
    group.add_argument(
        "--model-control-mode",
        choices=[each.value for each in ControlMode],
        default=defaults.control_mode.value,
        help="none: models never change; poll: folders are polled; explicit: by load requests "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--repository-poll-secs",
        type=seconds,
        default=defaults.poll_secs,
        metavar="SECS",
        help="interval of polls in mode poll (seconds, default: %(default)s)",
    )
    group.add_argument(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="load a model at the start in mode explicit; repeatable, '*' alone loads every model",
    )
    add_truth(group, "--exit-on-error", defaults.exit_on_error, "exit if a model fails to load")
    add_truth(
        group, "--strict-readiness", defaults.strict_readiness, "ready only if every model is"
    )
    group.add_argument(
        "--model-load-thread-count",
        type=count,
        default=defaults.load_thread_count,
        metavar="N",
        help="concurrent loads (default: %(default)s)",
    )
    group.add_argument(
        "--model-load-retry-count",
        type=natural,
        default=defaults.load_retry_count,
        metavar="N",
        help="retries of a failed load (default: %(default)s)",
    )


def _add_config_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--model-config-name",
        default=ModelSettings().config_name,
        metavar="NAME",
        help="use a model's configs/NAME.pbtxt where it exists",
    )
    group.add_argument(
        "--disable-auto-complete-config",
        action="store_true",
        help="require complete configurations: backends do not complete them",
    )
    group.add_argument(
        "--strict-model-config",
        type=truth,
        metavar="true|false",
        help="deprecated: --disable-auto-complete-config",
    )
    group.add_argument(
        "--backend-config",
        action="append",
        default=[],
        type=backend_setting,
        metavar="BACKEND,KEY=VALUE",
        help="setting of one backend, or without a name of all backends; repeatable",
    )
    group.add_argument(
        "--backend-directory",
        type=Path,
        metavar="DIR",
        help="folder of backends written in Python: DIR/NAME/model.py makes NAME a backend",
    )


def _add_rate_limit_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--rate-limit",
        choices=RATE_LIMITS,
        default=RATE_LIMITS[0],
        help="execution_count: instances execute only while they have the resources of their "
        "rate_limiter, those with fewer executions first (default: %(default)s)",
    )
    group.add_argument(
        "--rate-limit-resource",
        action="append",
        default=[],
        type=resource_limit,
        metavar="NAME:COUNT[:DEVICE]",
        help="count of a resource, on that device or on each; repeatable (default: the largest "
        "demand of an instance)",
    )
