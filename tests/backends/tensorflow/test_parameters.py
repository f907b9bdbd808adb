"""Parameters of TensorFlow models are read as Triton reads them."""

import pytest

from backends.tensorflow.parameters import TensorFlowParameters
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors


def read(
    *, count: int = 1, settings: dict[str, str] | None = None, **parameters: str
) -> TensorFlowParameters:
    group = InstanceGroup(kind=InstanceKind.KIND_CPU, count=count)
    config = ModelConfig(name="m", parameters=parameters, instance_group=(group,))
    return TensorFlowParameters.read(config, settings or {})


def test_sessions_share_the_cores() -> None:
    found = read()
    assert (found.tag, found.signature, found.share_count) == ("serve", "", 1)
    assert found.intra_threads == processors()
    assert read(count=processors()).intra_threads == 1
    shared = read(count=processors(), MAX_SESSION_SHARE_COUNT=str(processors()))
    assert shared.intra_threads == processors()


def test_a_session_of_one_thread_has_that_of_its_runs() -> None:
    assert read(count=processors()).inter_threads == -1
    assert read(TF_NUM_INTER_THREADS="1").inter_threads == -1


def test_given_values_are_used() -> None:
    found = read(
        TF_NUM_INTRA_THREADS="3",
        TF_NUM_INTER_THREADS="4",
        TF_USE_PER_SESSION_THREADS="yes",
        TF_GRAPH_TAG="tuned",
        TF_SIGNATURE_DEF="predict",
        TF_INIT_OPS_FILE="ops.json",
    )
    assert (found.intra_threads, found.inter_threads) == (3, 4)
    assert (found.tag, found.signature, found.init_ops_file) == ("tuned", "predict", "ops.json")


def test_options_of_the_backend_are_read() -> None:
    found = read(
        settings={"allow-soft-placement": "false", "gpu-memory-fraction": "0.5", "version": "2"}
    )
    assert (found.soft_placement, found.gpu_memory_fraction) == (False, 0.5)
    assert read().soft_placement


@pytest.mark.parametrize("text", ["much", "-1", "2", "nan"])
def test_a_share_of_memory_is_a_number_from_0_to_1(text: str) -> None:
    with pytest.raises(InferenceError, match=f"gpu-memory-fraction is '{text}', expected"):
        read(settings={"gpu-memory-fraction": text})


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("TF_NUM_INTRA_THREADS", "-1", "must be non-negative number for TensorFlow model 'm'"),
        ("TF_NUM_INTER_THREADS", "-2", "must be non-negative number for TensorFlow model 'm'"),
        ("MAX_SESSION_SHARE_COUNT", "0", "must be positive number for TensorFlow model 'm'"),
        ("TF_NUM_INTRA_THREADS", "1025", "of model 'm' is 1025, expected at most 1024"),
    ],
)
def test_other_numbers_are_refused_with_tritons_texts(key: str, text: str, expected: str) -> None:
    with pytest.raises(InferenceError) as refused:
        read(**{key: text})
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == f"parameter '{key}' {expected}"


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("TF_NUM_INTRA_THREADS", "integral number"),
        ("MAX_SESSION_SHARE_COUNT", "integral number"),
        ("TF_USE_PER_SESSION_THREADS", "boolean"),
    ],
)
def test_values_of_another_kind_are_refused(key: str, kind: str) -> None:
    with pytest.raises(InferenceError, match=f"'{key}': failed to convert 'two' to {kind}"):
        read(**{key: "two"})
