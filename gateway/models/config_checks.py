"""Checks of a configuration, with Triton's texts."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gateway.config import InputFormat, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.platforms import ENSEMBLE, TENSORRT, accepted_platforms
from gateway.config.scheduling import DynamicBatching, QueuePolicy, TimeoutAction
from gateway.ensembles.checks import flow_problems
from gateway.errors import Code, InferenceError
from gateway.models.replicas import problems as replica_problems
from gateway.models.sequence_checks import sequence_problems

ANY_SIZE = -1
SIZES_ALLOWED = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def check_config(config: ModelConfig) -> None:
    """Raise INVALID_ARG for the first problem of the model as a whole."""
    _raise_first(_model_problems(config))
    if config.dynamic_batching is not None:
        _raise_first(_batching_problems(config, config.dynamic_batching))
    if config.sequence_batching is not None:
        _raise_first(sequence_problems(config, config.sequence_batching))


def check_tensors(config: ModelConfig) -> None:
    """Raise INVALID_ARG for the first incomplete or contradictory input or output."""
    for tensor in config.input:
        _raise_first(f"{each} for {config.name}" for each in _input_problems(tensor, config))
    for output in config.output:
        _raise_first(f"{each} for {config.name}" for each in _output_problems(output, config))
    _raise_first(batch_problems(config))


def _raise_first(problems: Iterator[str]) -> None:
    if problem := next(problems, ""):
        raise InferenceError(Code.INVALID_ARG, problem)


# The model as a whole.


def _model_problems(config: ModelConfig) -> Iterator[str]:
    yield from _platform_problems(config)
    if config.max_batch_size < 0:
        yield f"'max_batch_size' must be non-negative value for {config.name}"
    yield from _cache_problems(config)
    yield from _metrics_problems(config)
    yield from replica_problems(config)


def _platform_problems(config: ModelConfig) -> Iterator[str]:
    name, platform, backend = config.name, config.platform, config.backend
    if platform == ENSEMBLE:
        yield from _ensemble_problems(config)
    elif config.ensemble_scheduling is not None:
        yield (
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        )
    elif not (platform or backend):
        yield f"must specify 'platform' or 'backend' for '{name}'"
    elif not backend:
        yield f"unexpected platform type '{platform}' for {name}"
    elif (accepted := accepted_platforms(backend)) and platform not in accepted:
        yield f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"


def _ensemble_problems(config: ModelConfig) -> Iterator[str]:
    if config.backend:
        yield (
            f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend "
            "type"
        )
    if config.ensemble_scheduling is None:
        yield (
            f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble"
        )
    yield from flow_problems(config)


def _cache_problems(config: ModelConfig) -> Iterator[str]:
    if config.response_cache is None or not config.response_cache.enable:
        return
    refusal = f"Response Cache does not currently support model {config.name} with"
    if config.sequence_batching is not None:
        yield f"{refusal} sequence batching scheduler. Please disable the response cache."
    if config.decoupled:
        yield f"{refusal} 'decoupled' transaction policy. Please disable the response cache."


def _metrics_problems(config: ModelConfig) -> Iterator[str]:
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier is None:
            yield "metric control must specify 'metric_identifier'"
        elif not control.metric_identifier.family:
            yield "metric identifier must specify non-empty 'family'"
        elif control.histogram_options is None:
            yield "metric control must specify 'histogram_options'"
        elif not control.histogram_options.buckets:
            yield "histogram options must specify non-empty 'buckets'"


# Dynamic batching.


def _batching_problems(config: ModelConfig, batching: DynamicBatching) -> Iterator[str]:
    name = config.name
    for size in batching.preferred_batch_size:
        if size <= 0:
            yield f"dynamic batching preferred size must be positive for {name}"
        if size > config.max_batch_size:
            yield f"dynamic batching preferred size must be <= max batch size for {name}"
    if levels := batching.priority_levels:
        if not 1 <= batching.default_priority_level <= levels:
            yield f"default priority level must be in range [1, {levels}] for {name}"
        if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
            yield (
                f"priority queue policy must have priority level in range [1, {levels}] for {name}"
            )
    if batching.preserve_ordering:
        yield from _ordering_problems(name, batching)


def _ordering_problems(name: str, batching: DynamicBatching) -> Iterator[str]:
    if batching.priority_levels > 1:
        yield f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(policy is not None and _delays(policy) for policy in policies):
        yield (
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            f"for {name}"
        )


def _delays(policy: QueuePolicy) -> bool:
    return policy.timeout_action is TimeoutAction.DELAY and policy.default_timeout_microseconds != 0


# Inputs and outputs.


def _input_problems(tensor: ModelInput, config: ModelConfig) -> Iterator[str]:
    yield from _shape_problems(tensor, "model input", config)
    if tensor.format is not InputFormat.FORMAT_NONE and len(tensor.dims) != 3:
        yield "model input NHWC/NCHW require 3 dims"
    yield from _layout_problems(tensor, "input", config)


def _output_problems(tensor: ModelOutput, config: ModelConfig) -> Iterator[str]:
    yield from _shape_problems(tensor, "model output", config)
    yield from _layout_problems(tensor, "output", config)


def _layout_problems(
    tensor: ModelInput | ModelOutput, role: str, config: ModelConfig
) -> Iterator[str]:
    if tensor.is_shape_tensor and config.platform != TENSORRT:
        yield "shape tensors are only supported for TensorRT platform"
    if tensor.is_non_linear_format_io:
        if config.platform != TENSORRT:
            yield "Non-linear IO format is only supported for the TensorRT platform"
        if len(tensor.dims) != 3:
            yield f"Non-linear IO format {role} requires 3 dims"


def _shape_problems(
    tensor: ModelInput | ModelOutput, role: str, config: ModelConfig
) -> Iterator[str]:
    if not tensor.name:
        yield f"{role} must specify 'name'"
    if tensor.data_type is DataType.TYPE_INVALID:
        yield f"{role} '{tensor.name}' must specify 'data_type'"
    if not tensor.dims:
        yield f"{role} '{tensor.name}' must specify 'dims'"
    if tensor.reshape is not None and not tensor.reshape.shape and not config.batching:
        yield (
            f"{role} '{tensor.name}' cannot have empty reshape for non-batching model as scalar "
            "tensors are not supported"
        )
    if not _sizes_are_valid(tensor.dims):
        yield f"{role} '{tensor.name}' dimension {SIZES_ALLOWED}"
    if tensor.reshape is not None:
        for problem in _reshape_problems(tensor.dims, tensor.reshape.shape):
            yield f"{role} '{tensor.name}' {problem}"


def _reshape_problems(dims: Sequence[int], shape: Sequence[int]) -> Iterator[str]:
    if not _sizes_are_valid(shape):
        yield f"reshape dimensions {SIZES_ALLOWED}"
    before, after = _fixed_sizes(dims), _fixed_sizes(shape)
    if (len(before) == 1) != (len(after) == 1):
        yield "has different size for dims and reshape"
    if len(before) != len(after):
        yield "has different number of variable-size dimensions for dims and reshape"
    if before != after:
        yield "has different size for dims and reshape"


def _sizes_are_valid(sizes: Sequence[int]) -> bool:
    return all(size >= 1 or size == ANY_SIZE for size in sizes)


def _fixed_sizes(sizes: Sequence[int]) -> list[int]:
    """Elements between the dimensions of variable size: [2, -1, 3, 4] to [2, 12]."""
    products = [1]
    for size in sizes:
        if size == ANY_SIZE:
            products.append(1)
        else:
            products[-1] *= size
    return products


BATCH_INPUT_TYPES = (DataType.TYPE_INT32, DataType.TYPE_FP32)


def batch_problems(config: ModelConfig) -> Iterator[str]:
    """Problems of `batch_input` and `batch_output`."""
    inputs = {each.name for each in config.input}
    for batch_input in config.batch_input:
        yield from _source_problems("input", batch_input.kind, batch_input.source_input, inputs)
        if batch_input.data_type not in BATCH_INPUT_TYPES:
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
    for batch_output in config.batch_output:
        yield from _source_problems("output", batch_output.kind, batch_output.source_input, inputs)
    yield from _target_problems(config)


def _source_problems(
    role: str, kind: str, sources: tuple[str, ...], inputs: set[str]
) -> Iterator[str]:
    if len(sources) != 1:
        yield f"batch {role} kind '{kind}' expects 1 source input, got {len(sources)}"
    for name in sources:
        if name not in inputs:
            yield f"unknown source input name '{name}'"


def _target_problems(config: ModelConfig) -> Iterator[str]:
    outputs = {each.name for each in config.output}
    targets = Counter(name for each in config.batch_output for name in each.target_name)
    for name, times in targets.items():
        if name not in outputs:
            yield f"unknown target output name '{name}'"
        if times > 1:
            yield f"target output name '{name}' can only be specified once"
