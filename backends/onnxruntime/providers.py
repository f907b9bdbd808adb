"""Execution providers of an instance, in their order and with their options."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from backends.onnxruntime.library import onnxruntime
from gateway.config import InstanceKind, ModelConfig
from gateway.config.optimization import Accelerator, ExecutionAccelerators
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.parameters import integer, switch

Provider = tuple[str, dict[str, str]]

TENSORRT = "TensorrtExecutionProvider"
CUDA = "CUDAExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
CPU = "CPUExecutionProvider"

TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
PRECISIONS = {
    "FP32": "",
    "FP16": "trt_fp16_enable",
    "BF16": "trt_bf16_enable",
    "INT8": "trt_int8_enable",
}
CONVOLUTION_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
ARENA_STRATEGIES = ("kNextPowerOfTwo", "kSameAsRequested")


def providers(config: ModelConfig, kind: InstanceKind, device: int) -> list[Provider]:
    """The providers of an instance: accelerators of the GPU, CUDA, those of the CPU, the CPU.

    Raises InferenceError INVALID_ARG for an accelerator or an option that does not exist.
    """
    policy = config.optimization
    wanted = (policy and policy.execution_accelerators) or ExecutionAccelerators()
    found: list[Provider] = []
    if kind is InstanceKind.KIND_GPU:
        found += _gpu(wanted.gpu_execution_accelerator, config, device)
    found += [_openvino(each) for each in wanted.cpu_execution_accelerator]
    return [*found, (CPU, {})]


def require_installed(wanted: Iterable[Provider], name: str) -> None:
    """Raise InferenceError UNSUPPORTED if the installed library lacks one of them."""
    installed = onnxruntime.get_available_providers()
    for provider, _ in wanted:
        if provider not in installed:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"instance '{name}' needs {provider}, but the installed onnxruntime has only "
                f"{', '.join(installed)}; install a build that has it, such as onnxruntime-gpu",
            )


def _gpu(
    accelerators: Sequence[Accelerator], config: ModelConfig, device: int
) -> Iterator[Provider]:
    cuda: dict[str, str] = {}
    for each in accelerators:
        if each.name == "tensorrt":
            yield TENSORRT, {"device_id": str(device), **_tensorrt_options(each.parameters)}
        elif each.name == "cuda":
            cuda.update(each.parameters)
        else:
            raise _unknown(each)
    yield CUDA, {"device_id": str(device), **_cuda_options(config.parameters), **cuda}


def _openvino(accelerator: Accelerator) -> Provider:
    if accelerator.name != "openvino":
        raise _unknown(accelerator)
    return OPENVINO, dict(accelerator.parameters)


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            options.update(_precision(value))
        elif key in TENSORRT_NAMES or key.startswith("trt_"):
            options[TENSORRT_NAMES.get(key, key)] = value
        else:
            raise InferenceError(
                Code.INVALID_ARG,
                f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator",
            )
    return options


def _precision(mode: str) -> dict[str, str]:
    if mode not in PRECISIONS:
        raise InferenceError(Code.INVALID_ARG, f"unsupported precision mode '{mode}' is requested")
    return {PRECISIONS[mode]: "1"} if PRECISIONS[mode] else {}


def _cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    if key := _chosen(parameters, "cudnn_conv_algo_search", CONVOLUTION_SEARCHES):
        options["cudnn_conv_algo_search"] = key
    if key := _chosen(parameters, "arena_extend_strategy", ARENA_STRATEGIES):
        options["arena_extend_strategy"] = key
    if "gpu_mem_limit" in parameters:
        options["gpu_mem_limit"] = str(integer(parameters, "gpu_mem_limit"))
    if "do_copy_in_default_stream" in parameters:
        copies = switch(parameters, "do_copy_in_default_stream", default=True)
        options["do_copy_in_default_stream"] = str(int(copies))
    return options


def _chosen(parameters: Mapping[str, str], key: str, names: Sequence[str]) -> str:
    """The name for a number, "" if the key is missing."""
    if key not in parameters:
        return ""
    number = integer(parameters, key)
    if not 0 <= number < len(names):
        raise InferenceError(
            Code.INVALID_ARG,
            f"parameter '{key}' is {number}, expected a number from 0 to {len(names) - 1}",
        )
    return names[number]


def _unknown(accelerator: Accelerator) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"unknown Execution Accelerator '{accelerator.name}' is requested"
    )
