"""Parameters of forests are read as Triton reads them."""

from pathlib import Path

import pytest

from backends.fil.backend import FilBackend
from backends.fil.parameters import FilParameters
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors
from tests.builders import soon


def read(*, count: int = 1, **parameters: str) -> FilParameters:
    group = InstanceGroup(kind=InstanceKind.KIND_CPU, count=count)
    return FilParameters.read(ModelConfig(name="m", parameters=parameters, instance_group=(group,)))


def test_without_parameters_the_file_decides_and_instances_share_the_cores() -> None:
    assert read() == FilParameters(None, False, 0.5, processors())
    assert read(count=1000).threads == 1


def test_parameters_have_an_effect() -> None:
    found = read(is_classifier="true", predict_proba="true", threshold="0.25", cpu_nthread="3")
    assert found == FilParameters(True, True, 0.25, 3)
    assert read(cpu_nthread="-1").threads == processors()


def test_the_old_name_of_is_classifier_counts_if_the_new_one_is_missing() -> None:
    assert read(output_class="true").classifies is True
    assert read(output_class="true", is_classifier="false").classifies is False


@pytest.mark.parametrize(
    "key",
    [
        "is_classifier",
        "output_class",
        "predict_proba",
        "xgboost_allow_unknown_field",
        "use_experimental_optimizations",
    ],
)
@pytest.mark.parametrize("text", ["True", "1", "yes", ""])
def test_other_booleans_are_refused_with_tritons_text(key: str, text: str) -> None:
    with pytest.raises(InferenceError) as refused:
        read(**{key: text})
    assert refused.value.code is Code.INTERNAL
    assert refused.value.message == (
        f"Expected 'true' or 'false' for parameter '{key}', got: '{text}'"
    )


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("threshold", "half"),
        ("threshold", "nan"),
        ("cpu_nthread", "two"),
        ("cpu_nthread", "1.5"),
        ("chunk_size", ""),
        ("transfer_threshold", "many"),
    ],
)
def test_other_numbers_are_refused_with_tritons_text(key: str, text: str) -> None:
    with pytest.raises(InferenceError) as refused:
        read(**{key: text})
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == f"Bad input for parameter {key}"


@pytest.mark.parametrize("threads", [1025, 99999999999, 10**400])
def test_more_threads_than_a_machine_starts_are_refused(threads: int) -> None:
    with pytest.raises(InferenceError) as refused:
        read(cpu_nthread=str(threads))
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == (
        f"Bad input for parameter cpu_nthread: found {threads}, expected at most 1024"
    )
    assert read(cpu_nthread="1024").threads == 1024


async def test_removed_parameters_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ("algo", "threads_per_tree", "storage_type", "blocks_per_sm", "layout")
    parameters = {**dict.fromkeys(keys, "x"), "use_experimental_optimizations": "true"}
    await soon(FilBackend().prepare(ModelConfig(name="m", parameters=parameters), folder))
    assert caplog.messages == [
        "The `algo` parameter has been removed in 25.09 release. Use `layout` instead.",
        "The `threads_per_tree` parameter has been removed in 25.09 release. Use `chunk_size` "
        "instead.",
        "The `storage_type` parameter has been removed in 25.09 release.",
        "The `blocks_per_sm` parameter has been removed in 25.09 release.",
        "The `use_experimental_optimizations` parameter is deprecated and has no effect.",
    ]
