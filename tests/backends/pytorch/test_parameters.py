"""Triton's parameters for PyTorch are read as Triton reads them."""

import pytest

from backends.pytorch.parameters import PytorchParameters, thread_count
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError


def read(**parameters: str) -> PytorchParameters:
    return PytorchParameters.read(ModelConfig(name="m", parameters=parameters))


def test_the_defaults_are_tritons() -> None:
    assert read(max_in_flight="7", inference_mode="nonsense", NAME="1") == PytorchParameters(
        inference_mode=True,
        disable_optimized_execution=False,
        enable_weight_sharing=False,
        enable_cache_cleaning=False,
        disable_cudnn=False,
        enable_jit_executor=None,
        intra_op_thread_count=0,
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("ON", True), ("1", True), ("False", False), ("off", False), ("0", False)],
)
def test_booleans_are_spelt_as_in_triton(text: str, value: bool) -> None:
    assert read(INFERENCE_MODE=text).inference_mode is value
    assert read(ENABLE_JIT_PROFILING=text).enable_jit_profiling is value


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("0", 0), ("-1", 0)])
def test_counts_that_are_not_positive_ask_for_nothing(text: str, count: int) -> None:
    assert read(INTRA_OP_THREAD_COUNT=text).intra_op_thread_count == count


@pytest.mark.parametrize(
    ("key", "text", "why"),
    [
        ("INFERENCE_MODE", "maybe", "failed to convert 'maybe' to boolean"),
        ("ENABLE_WEIGHT_SHARING", "", "failed to convert '' to boolean"),
        ("INTER_OP_THREAD_COUNT", "two", "failed to convert 'two' to integral number"),
    ],
)
def test_other_values_are_refused_with_tritons_texts(key: str, text: str, why: str) -> None:
    with pytest.raises(InferenceError) as refused:
        read(**{key: text})
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == f"model 'm', parameter '{key}': {why}"


def test_the_budget_of_threads_is_a_setting_of_the_backend() -> None:
    assert thread_count({}) == 0
    assert thread_count({"thread-count": "4"}) == 4
    with pytest.raises(InferenceError, match="failed to convert 'x' to integral number"):
        thread_count({"thread-count": "x"})
