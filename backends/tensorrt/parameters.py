"""Settings of a config and of `--backend-config`."""

from collections.abc import Mapping
from enum import Enum

from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.config.optimization import CudaOptions, OptimizationPolicy, OptimizationPriority
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.parameters import as_boolean

VERSION_COMPATIBLE = "version-compatible"
PLUGINS = "plugins"
STRATEGY = "execution_context_allocation_strategy"
URGENCY = {
    OptimizationPriority.PRIORITY_DEFAULT: 0,
    OptimizationPriority.PRIORITY_MAX: 1,
    OptimizationPriority.PRIORITY_MIN: -1,
}


class Allocation(Enum):
    """Profiles for which an instance has memory for intermediate results."""

    STATIC = "STATIC"
    """All profiles of the engine."""
    ON_PROFILE_CHANGE = "ON_PROFILE_CHANGE"
    """The profiles of the instance."""


def allocation(config: ModelConfig, instance: str) -> Allocation:
    """The strategy of the model; INVALID_ARG, in Triton's words, for an unknown one."""
    text = config.parameter(STRATEGY, Allocation.STATIC.value)
    try:
        return Allocation(text)
    except ValueError:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Invalid value for '{STRATEGY}': '{text}' for model instance '{instance}'",
        ) from None


def version_compatible(settings: Mapping[str, str]) -> bool:
    """Whether plans may bring their own runtime, which is foreign code."""
    try:
        return as_boolean(settings.get(VERSION_COMPATIBLE, "false"))
    except ValueError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"--backend-config=tensorrt,{VERSION_COMPATIBLE}: {error}"
        ) from None


def profile_indices(group: InstanceGroup, model: str, count: int) -> tuple[int, ...]:
    """The profiles of a group, each once; the engine's first if it names none.

    Raises InferenceError INVALID_ARG for one beyond the engine's `count`.
    """
    found = dict.fromkeys(_index(name, model, count) for name in group.profile)
    return tuple(sorted(found)) or (0,)


def _index(name: str, model: str, count: int) -> int:
    if name.strip().isdecimal() and int(name) < count:
        return int(name)
    raise InferenceError(
        Code.INVALID_ARG,
        f"instance_group of model '{model}' specifies invalid profile '{name}'. Number of profiles "
        f"supported by TensorRT engine: {count}; expected one of "
        f"{', '.join(map(repr, map(str, range(count))))}",
    )


def dla_core(group: InstanceGroup, model: str) -> int | None:
    """The DLA core in a group's secondary devices; INVALID_ARG for several."""
    if not group.secondary_devices:
        return None
    if len(group.secondary_devices) > 1 or group.secondary_devices[0].device_id < 0:
        found = ", ".join(f"{each.kind} {each.device_id}" for each in group.secondary_devices)
        raise InferenceError(
            Code.INVALID_ARG,
            f"instance_group of model '{model}' has the secondary devices {found}, expected one "
            "KIND_NVDLA whose device_id is not negative",
        )
    return group.secondary_devices[0].device_id


def cuda_hints(config: ModelConfig) -> CudaOptions:
    """`optimization { cuda { ... } }`, with defaults."""
    policy = config.optimization
    return (policy and policy.cuda) or CudaOptions()


def urgency(config: ModelConfig) -> int:
    """`optimization { priority }`: 1 before other models, -1 behind them."""
    return URGENCY[(config.optimization or OptimizationPolicy()).priority]


def require_gpu(config: ModelConfig, group: InstanceGroup) -> None:
    """Raise INVALID_ARG, in Triton's words, for instances that are not on a GPU."""
    if group.kind is not InstanceKind.KIND_GPU:
        raise InferenceError(
            Code.INVALID_ARG,
            f"unable to load model '{config.name}', TensorRT backend supports only GPU device: "
            f"instance group '{group.name}' has kind {group.kind}, expected KIND_GPU (or KIND_AUTO "
            "on a machine whose GPU the server finds)",
        )
