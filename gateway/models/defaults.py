"""What does a configuration mean where it says nothing?"""

from dataclasses import replace

from gateway.config import LatestVersions, ModelConfig, VersionPolicy
from gateway.config.optimization import OptimizationPolicy, PinnedMemoryBuffer
from gateway.config.platforms import ENSEMBLE
from gateway.config.scheduling import DynamicBatching, SequenceBatching

SEQUENCE_IDLE_US = 1_000_000


def fill_defaults(config: ModelConfig) -> ModelConfig:
    """The config with Triton's defaults for versions, batching and memory written out."""
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
