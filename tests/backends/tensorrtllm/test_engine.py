"""The GPU of an engine, and the reasons why it may not start."""

import importlib.util
import os
from typing import Any

import pytest
from sluice_llm.request import Mistake

from backends.tensorrtllm.worker.sluice_tensorrtllm.engine import (
    VISIBLE,
    choose_gpu,
    import_library,
    opened,
)
from backends.tensorrtllm.worker.sluice_tensorrtllm.model_file import LlmModelFile

FILE = LlmModelFile(name="model.yaml", arguments={"model": "m"})


def on(kind: str, device: int = 0) -> dict[str, str]:
    return {"model_instance_kind": kind, "model_instance_device_id": str(device)}


@pytest.mark.parametrize(
    ("seen", "expected"), [("", "1"), ("4,5", "5"), ("GPU-aa,GPU-bb", "GPU-bb")]
)
def test_an_instance_on_a_gpu_sees_no_other(
    monkeypatch: pytest.MonkeyPatch, seen: str, expected: str
) -> None:
    monkeypatch.setenv(VISIBLE, seen)
    choose_gpu(on("GPU", 1), FILE)
    assert os.environ[VISIBLE] == expected


def test_an_instance_of_kind_model_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5")
    choose_gpu(on("MODEL"), LlmModelFile(name="f", arguments={"tensor_parallel_size": 2}))
    assert os.environ[VISIBLE] == "4,5"


def test_a_gpu_that_cannot_be_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4")
    with pytest.raises(Mistake, match="names GPU 1, but CUDA_VISIBLE_DEVICES shows 1"):
        choose_gpu(on("GPU", 1), FILE)
    with pytest.raises(Mistake, match="tensor_parallel_size 2, but its instance group is KIND_GPU"):
        choose_gpu(on("GPU"), LlmModelFile(name="f", arguments={"tensor_parallel_size": 2}))


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_llm") is not None, reason="tensorrt_llm is installed"
)
def test_a_missing_package_is_named_with_the_way_to_get_it() -> None:
    with pytest.raises(Mistake, match=r"no package 'tensorrt_llm'; .*'tensorrt-llm==1\.2\.\*'"):
        import_library()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TypeError("unexpected 'x'"), "its model.yaml is refused by tensorrt_llm.LLM: unexpected"),
        (RuntimeError("CUDA out of memory"), "the GPU is out of memory"),
        (RuntimeError("Found no NVIDIA driver"), "no NVIDIA GPU and driver were found"),
        (RuntimeError("bad plan /srv/x/y.engine"), "its engine does not start: bad plan <path>"),
    ],
)
def test_an_engine_that_does_not_start_says_why(error: Exception, text: str) -> None:
    def llm(**_: Any) -> None:
        raise error

    with pytest.raises(Mistake) as refusal:
        opened(llm, FILE)
    assert text in str(refusal.value)


def test_the_files_setting_of_statistics_comes_first() -> None:
    assert opened(dict, FILE) == {"model": "m", "enable_iter_perf_stats": True}
    told = LlmModelFile(name="f", arguments={"model": "m", "enable_iter_perf_stats": False})
    assert opened(dict, told)["enable_iter_perf_stats"] is False
