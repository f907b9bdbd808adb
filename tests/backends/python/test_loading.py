"""Settings of workers in a config and --backend-config: defaults, limits, Triton's refusals."""

import pytest

from backends.python.loading import WorkerLimits, refuse_special_name, stub_timeout_secs
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(name="m", parameters=parameters)


def test_defaults_are_those_of_the_readme() -> None:
    found = WorkerLimits.read(config())
    assert found.execute_timeout_secs == 0
    assert found.abandoned_execute_secs == 30
    assert found.worker_memory_limit_mb == 0
    assert found.health_check_secs == 5
    assert stub_timeout_secs({}) == 30


def test_a_config_sets_them() -> None:
    found = WorkerLimits.read(config(execute_timeout_secs="1.5", worker_memory_limit_mb="512"))
    assert found.execute_timeout_secs == 1.5
    assert found.worker_memory_limit_mb == 512


@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf"])
def test_a_value_that_is_no_number_is_named(value: str) -> None:
    with pytest.raises(InferenceError, match="parameter 'health_check_secs' is '"):
        WorkerLimits.read(config(health_check_secs=value))


def test_tensors_may_be_forced_to_the_cpu_or_not() -> None:
    WorkerLimits.read(config(FORCE_CPU_ONLY_INPUT_TENSORS="no"))
    with pytest.raises(InferenceError) as refused:
        WorkerLimits.read(config(FORCE_CPU_ONLY_INPUT_TENSORS="maybe"))
    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message == ("Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe'")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("shm-default-byte-size", "1048575", "can't be smaller than 4 MiBs"),
        ("shm-growth-byte-size", "0", "can't be smaller than or equal to zero."),
        ("shm-region-prefix-name", "", "must at least contain one character."),
        ("thread-pool-size", "0", "can't be less than 1."),
        ("stub-timeout-seconds", "0", "can't be smaller than or equal to zero."),
    ],
)
def test_settings_are_refused_with_tritons_texts(key: str, value: str, text: str) -> None:
    with pytest.raises(InferenceError) as refused:
        stub_timeout_secs({key: value})
    assert refused.value.message == f"{key} {text}"


def test_a_setting_that_is_no_number_is_named() -> None:
    with pytest.raises(InferenceError, match="python,thread-pool-size is 'x', expected an integer"):
        stub_timeout_secs({"thread-pool-size": "x"})


def test_tritons_settings_for_shared_memory_are_accepted() -> None:
    settings = {"shm-default-byte-size": "1048576", "shm-growth-byte-size": "1"}
    assert stub_timeout_secs({**settings, "stub-timeout-seconds": "7", "other": "x"}) == 7


def test_a_name_that_a_shell_would_read_is_refused() -> None:
    refuse_special_name("model-1.b_0")
    with pytest.raises(InferenceError, match="Invalid stub name: contains invalid characters"):
        refuse_special_name("a{b}_0")
