"""A config is completed as by Triton."""

import pytest

from gateway.config import (
    LatestVersions,
    ModelConfig,
    ModelInput,
    ModelOutput,
    SpecificVersions,
    VersionPolicy,
)
from gateway.config.optimization import OptimizationPolicy, PinnedMemoryBuffer
from gateway.config.pbtxt import parse
from gateway.config.scheduling import (
    DynamicBatching,
    EnsembleScheduling,
    EnsembleStep,
    SequenceBatching,
    StrategyDirect,
    StrategyOldest,
)
from gateway.models.instance_groups import UsableGpus
from gateway.models.normalisation import normalise


def normalised(text: str) -> ModelConfig:
    """A model of the python backend unless the text says otherwise."""
    return normalise(parse(text, "m/config.pbtxt"), "m", frozenset({"model.py"}))


def test_the_folder_names_the_model() -> None:
    assert normalised("").name == "m"
    assert normalised('name: "m"').name == "m"


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", VersionPolicy(latest=LatestVersions(num_versions=1))),
        ("version_policy { }", VersionPolicy(latest=LatestVersions(num_versions=1))),
        ("version_policy { latest { } }", VersionPolicy(latest=LatestVersions())),
        (
            "version_policy { specific { versions: 3 } }",
            VersionPolicy(specific=SpecificVersions(versions=(3,))),
        ),
    ],
)
def test_the_latest_version_is_served_by_default(text: str, policy: VersionPolicy) -> None:
    assert normalised(text).version_policy == policy


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dynamic_batching { }", ()),
        ("max_batch_size: 8 dynamic_batching { }", (8,)),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] }", (2, 4)),
    ],
)
def test_the_largest_batch_is_preferred_by_default(text: str, sizes: tuple[int, ...]) -> None:
    assert normalised(text).dynamic_batching == DynamicBatching(preferred_batch_size=sizes)


@pytest.mark.parametrize(
    ("text", "batching"),
    [
        ("sequence_batching { }", SequenceBatching(max_sequence_idle_microseconds=1_000_000)),
        (
            "max_batch_size: 4 sequence_batching { oldest { } max_sequence_idle_microseconds: 5 }",
            SequenceBatching(
                oldest=StrategyOldest(preferred_batch_size=(4,)), max_sequence_idle_microseconds=5
            ),
        ),
        (
            "max_batch_size: 4 sequence_batching { direct { } }",
            SequenceBatching(direct=StrategyDirect(), max_sequence_idle_microseconds=1_000_000),
        ),
    ],
)
def test_sequences_expire_after_an_idle_second_by_default(
    text: str, batching: SequenceBatching
) -> None:
    assert normalised(text).sequence_batching == batching


@pytest.mark.parametrize(
    ("text", "inputs_pinned"),
    [("", True), ("optimization { input_pinned_memory { } }", False)],
)
def test_transfers_are_pinned_by_default(text: str, inputs_pinned: bool) -> None:
    assert normalised(text).optimization == OptimizationPolicy(
        input_pinned_memory=PinnedMemoryBuffer(enable=inputs_pinned),
        output_pinned_memory=PinnedMemoryBuffer(enable=True),
    )


def test_a_model_gets_its_backend_and_its_instances() -> None:
    config = normalised("")
    assert (config.backend, config.default_model_filename) == ("python", "model.py")
    assert [group.name for group in config.instance_group] == ["m"]


def test_the_gpus_of_the_machine_are_given_to_the_instances() -> None:
    [group] = normalise(ModelConfig(backend="x"), "m", gpus=UsableGpus((0, 1))).instance_group
    assert group.gpus == (0, 1)


def test_an_ensemble_has_no_instances_and_no_memory_of_its_own() -> None:
    step = EnsembleStep(model_name="a", input_map={"I": "X"}, output_map={"O": "Y"})
    config = normalised(
        'platform: "ensemble" input { name: "X" } output { name: "Y" } ensemble_scheduling { step {'
        'model_name: "a" input_map { key: "I" value: "X" } output_map { key: "O" value: "Y" } } }'
    )
    assert config == ModelConfig(
        name="m",
        platform="ensemble",
        version_policy=VersionPolicy(latest=LatestVersions(num_versions=1)),
        input=(ModelInput(name="X"),),
        output=(ModelOutput(name="Y"),),
        ensemble_scheduling=EnsembleScheduling(step=(step,)),
    )
