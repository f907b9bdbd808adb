"""Normalised configurations: defaults filled in, and what a backend adds."""

from collections.abc import Set
from dataclasses import replace

from gateway.config import LatestVersions, ModelConfig, VersionPolicy
from gateway.config.optimization import OptimizationPolicy, PinnedMemoryBuffer
from gateway.config.platforms import ENSEMBLE, resolve_backend
from gateway.config.scheduling import DynamicBatching, SequenceBatching
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_config, check_tensors
from gateway.models.instance_groups import (
    NO_GPUS,
    UsableGpus,
    check_instance_groups,
    fill_instance_groups,
)

SEQUENCE_IDLE_US = 1_000_000


def normalise(
    config: ModelConfig, name: str, files: Set[str] = frozenset(), gpus: UsableGpus = NO_GPUS
) -> ModelConfig:
    """The config with every default filled in, checked.

    `name` is the model's folder; `files` are those of its first version, with a slash after the
    names of folders. `check_tensors` checks inputs and outputs after the backend has completed the
    config.
    """
    if config.name not in ("", name):
        raise InferenceError(
            Code.INVALID_ARG,
            f"unexpected directory name '{name}' for model '{config.name}', directory name must "
            "equal model name",
        )
    whole = fill_defaults(resolve_backend(replace(config, name=name), files))
    check_config(whole)
    if whole.platform == ENSEMBLE:
        return whole
    whole = replace(whole, instance_group=fill_instance_groups(whole, gpus))
    check_instance_groups(whole, gpus)
    return whole


def fill_defaults(config: ModelConfig) -> ModelConfig:
    """The config with Triton's defaults for versions, batching and memory."""
    return replace(
        config,
        version_policy=_version_policy(config.version_policy),
        dynamic_batching=_dynamic_batching(config),
        sequence_batching=_sequence_batching(config),
        optimization=_optimization(config),
    )


def _version_policy(policy: VersionPolicy | None) -> VersionPolicy:
    if policy is None or policy == VersionPolicy():
        return VersionPolicy(latest=LatestVersions(num_versions=1))
    return policy


def _dynamic_batching(config: ModelConfig) -> DynamicBatching | None:
    batching = config.dynamic_batching
    if batching is None or batching.preferred_batch_size:
        return batching
    return replace(batching, preferred_batch_size=_largest(config))


def _sequence_batching(config: ModelConfig) -> SequenceBatching | None:
    batching = config.sequence_batching
    if batching is None:
        return None
    oldest = batching.oldest
    if oldest is not None and not oldest.preferred_batch_size:
        oldest = replace(oldest, preferred_batch_size=_largest(config))
    return replace(
        batching,
        oldest=oldest,
        max_sequence_idle_microseconds=batching.max_sequence_idle_microseconds or SEQUENCE_IDLE_US,
    )


def _largest(config: ModelConfig) -> tuple[int, ...]:
    return (config.max_batch_size,) if config.batching else ()


def _optimization(config: ModelConfig) -> OptimizationPolicy | None:
    if config.platform == ENSEMBLE:
        return config.optimization
    policy = config.optimization or OptimizationPolicy()
    pinned = PinnedMemoryBuffer(enable=True)
    return replace(
        policy,
        input_pinned_memory=policy.input_pinned_memory or pinned,
        output_pinned_memory=policy.output_pinned_memory or pinned,
    )


CHOICES = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


def completed(config: ModelConfig, said: ModelConfig) -> ModelConfig:
    """The config with the fields that a backend may complete (auto-complete).

    These are the batch size, inputs, outputs, the transaction policy, and a scheduling choice if
    the config has none. Raises INVALID_ARG if the config is still incomplete, INTERNAL if the
    backend has changed the scheduling choice.
    """
    whole = fill_defaults(
        replace(
            _scheduled(config, said),
            max_batch_size=said.max_batch_size,
            input=said.input,
            output=said.output,
            model_transaction_policy=said.model_transaction_policy,
        )
    )
    check_config(whole)
    check_tensors(whole)
    return whole


def _scheduled(config: ModelConfig, said: ModelConfig) -> ModelConfig:
    before, after = _choice(config), _choice(said)
    if not before:
        return replace(
            config,
            dynamic_batching=said.dynamic_batching,
            sequence_batching=said.sequence_batching,
        )
    if after != before:
        raise InferenceError(
            Code.INTERNAL,
            f"Cannot update scheduling choice from {before} to {after or 'none'} when "
            "auto-completing.",
        )
    return config


def _choice(config: ModelConfig) -> str:
    return next((each for each in CHOICES if getattr(config, each) is not None), "")
