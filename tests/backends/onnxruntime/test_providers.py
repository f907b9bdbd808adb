"""Accelerators of a config as execution providers."""

from typing import Any

import pytest

from backends.onnxruntime.providers import Provider, providers, require_installed
from gateway.config import InstanceKind, ModelConfig
from gateway.config.optimization import Accelerator, ExecutionAccelerators, OptimizationPolicy
from gateway.errors import Code, InferenceError

CPU = ("CPUExecutionProvider", {})


def config(
    gpu: tuple[Accelerator, ...] = (), cpu: tuple[Accelerator, ...] = (), **parameters: str
) -> ModelConfig:
    wanted = ExecutionAccelerators(gpu_execution_accelerator=gpu, cpu_execution_accelerator=cpu)
    policy = OptimizationPolicy(execution_accelerators=wanted)
    return ModelConfig(name="m", optimization=policy, parameters=parameters)


def on_gpu(found: ModelConfig, device: int = 0) -> list[Provider]:
    return providers(found, InstanceKind.KIND_GPU, device)


def accelerator(kind: str, **parameters: Any) -> Accelerator:
    return Accelerator(name=kind, parameters=parameters)


def test_a_model_without_wishes_runs_where_its_instance_is() -> None:
    assert providers(ModelConfig(), InstanceKind.KIND_CPU, 0) == [CPU]
    assert on_gpu(ModelConfig(), 1) == [("CUDAExecutionProvider", {"device_id": "1"}), CPU]


def test_providers_are_tried_from_the_fastest_to_the_cpu() -> None:
    found = on_gpu(config(gpu=(accelerator("tensorrt"),), cpu=(accelerator("openvino", a="b"),)))
    assert [name for name, _ in found] == [
        "TensorrtExecutionProvider",
        "CUDAExecutionProvider",
        "OpenVINOExecutionProvider",
        "CPUExecutionProvider",
    ]
    assert dict(found)["OpenVINOExecutionProvider"] == {"a": "b"}


def test_an_instance_on_the_cpu_needs_no_accelerator_of_the_gpu() -> None:
    assert providers(config(gpu=(accelerator("tensorrt"),)), InstanceKind.KIND_CPU, 0) == [CPU]


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"precision_mode": "FP32"}, {}),
        ({"precision_mode": "FP16"}, {"trt_fp16_enable": "1"}),
        ({"precision_mode": "BF16"}, {"trt_bf16_enable": "1"}),
        ({"precision_mode": "INT8"}, {"trt_int8_enable": "1"}),
        ({"max_workspace_size_bytes": "9"}, {"trt_max_workspace_size": "9"}),
        ({"trt_engine_cache_enable": "1"}, {"trt_engine_cache_enable": "1"}),
        (
            {"int8_calibration_table_name": "t", "int8_use_native_calibration_table": "1"},
            {"trt_int8_calibration_table_name": "t", "trt_int8_use_native_calibration_table": "1"},
        ),
    ],
)
def test_options_of_tensorrt_have_tritons_names(
    given: dict[str, str], options: dict[str, str]
) -> None:
    found = on_gpu(config(gpu=(accelerator("tensorrt", **given),)), 2)
    assert found[0] == ("TensorrtExecutionProvider", {"device_id": "2", **options})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (config(gpu=(accelerator("x"),)), "unknown Execution Accelerator 'x' is requested"),
        (config(cpu=(accelerator("x"),)), "unknown Execution Accelerator 'x' is requested"),
        (
            config(gpu=(accelerator("tensorrt", speed="1"),)),
            "unknown parameter 'speed' is provided for TensorRT Execution Accelerator",
        ),
        (
            config(gpu=(accelerator("tensorrt", precision_mode="FP8"),)),
            "unsupported precision mode 'FP8' is requested",
        ),
        (
            config(cudnn_conv_algo_search="3"),
            "parameter 'cudnn_conv_algo_search' is 3, expected a number from 0 to 2",
        ),
        (
            config(gpu_mem_limit="much"),
            "parameter 'gpu_mem_limit': failed to convert 'much' to integral number",
        ),
        (
            config(do_copy_in_default_stream="maybe"),
            "parameter 'do_copy_in_default_stream': failed to convert 'maybe' to boolean",
        ),
    ],
)
def test_unknown_options_of_providers_are_refused(wrong: ModelConfig, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        on_gpu(wrong)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == text


def test_options_of_cuda_are_those_of_parameters_and_of_the_accelerator() -> None:
    found = on_gpu(
        config(
            gpu=(accelerator("cuda", enable_cuda_graph="1", gpu_mem_limit="5"),),
            cudnn_conv_algo_search="1",
            arena_extend_strategy="1",
            gpu_mem_limit="4",
            do_copy_in_default_stream="false",
        )
    )
    assert found[0][1] == {
        "device_id": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": "5",
        "do_copy_in_default_stream": "0",
        "enable_cuda_graph": "1",
    }


def test_a_provider_that_is_not_installed_is_named() -> None:
    require_installed([CPU], "m_0")
    with pytest.raises(InferenceError) as caught:
        require_installed([("NoSuchExecutionProvider", {}), CPU], "m_0")
    assert caught.value.code is Code.UNSUPPORTED
    assert "instance 'm_0' needs NoSuchExecutionProvider" in caught.value.message
    assert "CPUExecutionProvider" in caught.value.message
