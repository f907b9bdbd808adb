"""Fields of a configuration that this release honours, ignores or refuses."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.config import ModelConfig
from gateway.config.schema import Cardinality, FieldShape, shapes
from gateway.errors import Code, InferenceError


class FieldVerdict(StrEnum):
    """The treatment of a configured field."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldSupport:
    """The verdict on a field and all fields below it, with the reason.

    The backends in `honoured_by` honour it.
    """

    verdict: FieldVerdict
    why: str = ""
    honoured_by: tuple[str, ...] = ()

    def by(self, backend: str) -> "FieldSupport":
        """The verdict for a model of that backend."""
        return HONOURED if backend in self.honoured_by else self


HONOURED = FieldSupport(FieldVerdict.HONOURED)
TENSORRT_HINT = FieldSupport(FieldVerdict.IGNORED, "a hint about speed for TensorRT", ("tensorrt",))
ONNX_RUNTIME = ("onnxruntime",)
NO_ACCELERATORS = FieldSupport(
    FieldVerdict.IGNORED, "only ONNX Runtime has execution accelerators", ONNX_RUNTIME
)
WITH_LIBRARIES = ("onnxruntime", "tensorflow")
STACKED = FieldSupport(
    FieldVerdict.IGNORED,
    "only forests and ONNX Runtime, OpenVINO, PyTorch, TensorFlow and TensorRT models get their "
    "batches as one tensor",
    ("fil", "onnxruntime", "openvino", "pytorch", "tensorflow", "tensorrt"),
)
UNUSED_HINT = FieldSupport(FieldVerdict.IGNORED, "a hint about speed that makes no difference here")
VECTORISED = FieldSupport(FieldVerdict.REFUSED, "tensors in vectorised formats are not served")
STATE_MEMORY = FieldSupport(
    FieldVerdict.IGNORED, "a hint about memory; states are never copied twice"
)
PINNED = FieldSupport(
    FieldVerdict.IGNORED, "a hint about speed; runtimes copy to their devices themselves"
)


def _ignored(why: str) -> FieldSupport:
    return FieldSupport(FieldVerdict.IGNORED, why)


def _refused(why: str) -> FieldSupport:
    return FieldSupport(FieldVerdict.REFUSED, why)


SUPPORT = {
    "name": HONOURED,
    "platform": HONOURED,
    "backend": HONOURED,
    "runtime": HONOURED,
    "version_policy": HONOURED,
    "max_batch_size": HONOURED,
    "input.name": HONOURED,
    "input.data_type": HONOURED,
    "input.format": HONOURED,
    "input.dims": HONOURED,
    "input.reshape": HONOURED,
    "input.is_shape_tensor": HONOURED,
    "input.allow_ragged_batch": HONOURED,
    "input.optional": HONOURED,
    "input.is_non_linear_format_io": VECTORISED,
    "output.name": HONOURED,
    "output.data_type": HONOURED,
    "output.dims": HONOURED,
    "output.reshape": HONOURED,
    "output.label_filename": HONOURED,
    "output.is_shape_tensor": HONOURED,
    "output.is_non_linear_format_io": VECTORISED,
    "batch_input": STACKED,
    "batch_output": STACKED,
    "optimization.graph": FieldSupport(
        FieldVerdict.IGNORED, "only ONNX Runtime optimises graphs at its load", ONNX_RUNTIME
    ),
    "optimization.priority": TENSORRT_HINT,
    "optimization.cuda": TENSORRT_HINT,
    "optimization.execution_accelerators.gpu_execution_accelerator": NO_ACCELERATORS,
    "optimization.execution_accelerators.cpu_execution_accelerator": NO_ACCELERATORS,
    "optimization.input_pinned_memory": PINNED,
    "optimization.output_pinned_memory": PINNED,
    "optimization.gather_kernel_buffer_threshold": UNUSED_HINT,
    "optimization.eager_batching": UNUSED_HINT,
    "dynamic_batching": HONOURED,
    "sequence_batching.direct": HONOURED,
    "sequence_batching.oldest": HONOURED,
    "sequence_batching.max_sequence_idle_microseconds": HONOURED,
    "sequence_batching.control_input": HONOURED,
    "sequence_batching.state.input_name": HONOURED,
    "sequence_batching.state.output_name": HONOURED,
    "sequence_batching.state.data_type": HONOURED,
    "sequence_batching.state.dims": HONOURED,
    "sequence_batching.state.initial_state": HONOURED,
    "sequence_batching.state.use_same_buffer_for_input_output": STATE_MEMORY,
    "sequence_batching.state.use_growable_memory": STATE_MEMORY,
    "sequence_batching.iterative_sequence": HONOURED,
    "ensemble_scheduling.step.model_name": HONOURED,
    "ensemble_scheduling.step.model_version": HONOURED,
    "ensemble_scheduling.step.input_map": HONOURED,
    "ensemble_scheduling.step.output_map": HONOURED,
    "ensemble_scheduling.step.model_namespace": _refused("namespaces are those of folders"),
    "ensemble_scheduling.max_inflight_requests": HONOURED,
    "instance_group.name": HONOURED,
    "instance_group.kind": HONOURED,
    "instance_group.count": HONOURED,
    "instance_group.rate_limiter": HONOURED,
    "instance_group.gpus": HONOURED,
    "instance_group.secondary_devices": FieldSupport(
        FieldVerdict.IGNORED, "only TensorRT has secondary devices", ("tensorrt",)
    ),
    "instance_group.profile": HONOURED,
    "instance_group.passive": HONOURED,
    "instance_group.host_policy": HONOURED,
    "default_model_filename": HONOURED,
    "cc_model_filenames": FieldSupport(
        FieldVerdict.IGNORED, "the default model file is used on every device", ("tensorrt",)
    ),
    "metric_tags": HONOURED,
    "parameters": HONOURED,
    "model_warmup": HONOURED,
    "model_operations": FieldSupport(
        FieldVerdict.IGNORED,
        "only ONNX Runtime and TensorFlow load libraries of operators",
        WITH_LIBRARIES,
    ),
    "model_transaction_policy": HONOURED,
    "model_repository_agents": HONOURED,
    "response_cache": HONOURED,
    "model_metrics": HONOURED,
}
"""The verdict on every field by its path; that on a message holds for all fields below it."""

OF_BACKENDS = {
    "tensorflow": {
        "optimization.execution_accelerators.cpu_execution_accelerator": _refused(
            "CPU Execution Accelerator is not supported in TensorFlow backend"
        ),
    },
}
"""Verdicts of single backends, which refuse these fields at the load."""

PARAMETERS = {
    "TRITON_BATCH_STRATEGY_PATH": _ignored("no library decides which requests share a batch"),
    "allow-pickle": _ignored("only --backend-config=sklearn,allow-pickle=true permits pickles"),
    "TF_USE_PER_SESSION_THREADS": _ignored("sessions of TensorFlow have threads of their own"),
    "roll_steps": _ignored(
        "there is no such parameter: a new version gets its requests by the steps of the model's "
        'rollout.json, such as {"steps": [{"weight": 10}, {"weight": 50}, {"weight": 100}]}'
    ),
    "roll_step_secs": _ignored(
        "there is no such parameter: each step of the model's rollout.json has its time, such as "
        '{"weight": 10, "for": "60s"}'
    ),
}
"""The verdict on keys of `parameters` that no model has; `supported_parameters` has the others."""


def field_support(path: str, backend: str) -> FieldSupport:
    """The verdict on a path of SUPPORT for a model of that backend."""
    return OF_BACKENDS.get(backend, {}).get(path) or SUPPORT[path].by(backend)


def require_supported(config: ModelConfig) -> None:
    """Raise UNSUPPORTED if the config, as written, sets a refused field."""
    for path in _paths_set(config):
        support = SUPPORT[path]
        if support.verdict is FieldVerdict.REFUSED:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"field '{path}' of model '{config.name}' is not supported: {support.why}",
            )


def ignored(config: ModelConfig, backend: str = "") -> Iterator[tuple[str, str]]:
    """The ignored fields and keys of `parameters` that the config sets, with the reasons.

    `backend` serves the model; the config as written need not name it.
    """
    for path in _paths_set(config):
        support = field_support(path, backend)
        if support.verdict is FieldVerdict.IGNORED:
            yield path, support.why
    for key in config.parameters:
        if key in PARAMETERS:
            yield f"parameters.{key}", PARAMETERS[key].why


def place_of(path: str, text: str) -> Mapping[str, str | int]:
    """The path of an ignored field, and the line of a key of `parameters` in a configuration."""
    key = re.escape(path.removeprefix("parameters."))
    found = re.search(rf"""^[^#\n]*\bkey\s*:\s*(["']){key}\1""", text, re.MULTILINE)
    return {"field": path} | ({"line": text.count("\n", 0, found.end()) + 1} if found else {})


def is_default(owner: Any, shape: FieldShape) -> bool:
    """Whether a dataclass has the default value in this field."""
    value = getattr(owner, shape.attribute)
    return bool(value == getattr(owner.__class__(), shape.attribute))


def _paths_set(owner: Any, above: str = "") -> Iterator[str]:
    for shape in shapes(owner.__class__):
        path = above + shape.name
        if is_default(owner, shape):
            continue
        if path in SUPPORT:
            yield path
            continue
        value = getattr(owner, shape.attribute)
        for each in value if shape.cardinality is Cardinality.MANY else (value,):
            yield from _paths_set(each, f"{path}.")
