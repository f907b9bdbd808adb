"""Does the config fit the engine? Triton's checks when it loads plans, and their texts."""

from collections.abc import Iterable, Iterator, Sequence

from backends.tensorrt.signature import Binding, Signature
from gateway.batches.extra_inputs import sequence_inputs, with_sequence_tensors
from gateway.batches.shapes import batched_shape_problems, whole_shape_problems
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape


def check(config: ModelConfig, signature: Signature, profiles: Sequence[int]) -> None:
    """Raise INVALID_ARG for the first thing in which they contradict each other.

    `profiles` are those of the instance. An engine may have more outputs than the config lists,
    but not more inputs.
    """
    problem = next(_problems(config, signature, profiles), "")
    if problem:
        raise InferenceError(Code.INVALID_ARG, problem)


def _problems(config: ModelConfig, signature: Signature, profiles: Sequence[int]) -> Iterator[str]:
    yield from _control_problems(config, signature)
    whole = with_sequence_tensors(config)
    scattered = {name for each in config.batch_output for name in each.target_name}
    for tensor in whole.input:
        yield from _name_problems(tensor.name, "input", signature.inputs)
        found = signature.inputs[tensor.name]
        yield from _type_problems(tensor.data_type, "input", found, config)
        yield from _mark_problems(tensor, "input", found, config)
        yield from _optional_problems(tensor, config)
        yield from _input_shape_problems(tensor, found, config)
    for batch_input in config.batch_input:
        for name in batch_input.target_name:
            yield from _name_problems(name, "input", signature.inputs)
            yield from _type_problems(
                batch_input.data_type, "input", signature.inputs[name], config
            )
    yield from _count_problems(config, signature)
    for output in whole.output:
        yield from _name_problems(output.name, "output", signature.outputs)
        found = signature.outputs[output.name]
        yield from _type_problems(output.data_type, "output", found, config)
        yield from _mark_problems(output, "output", found, config)
        if output.name not in scattered:
            yield from _shape_problems(output, found, config)
    yield from _batch_problems(config, signature, profiles)


def _control_problems(config: ModelConfig, signature: Signature) -> Iterator[str]:
    batching = config.sequence_batching
    for each in batching.control_input if batching else ():
        if each.name not in signature.inputs:
            yield (
                f"configuration specified sequence control '{each.name}', but model does not "
                "provide that input"
            )


def _count_problems(config: ModelConfig, signature: Signature) -> Iterator[str]:
    batching = config.sequence_batching
    names = {each.name for each in config.input}
    names.update(name for each in config.batch_input for name in each.target_name)
    names.update(each.name for each in (sequence_inputs(batching) if batching else ()))
    if len(names) != len(signature.inputs):
        yield (
            f"unable to load model '{config.name}', configuration expects {len(names)} inputs, "
            f"model provides {len(signature.inputs)}"
        )


def _name_problems(name: str, role: str, known: Iterable[str]) -> Iterator[str]:
    if name not in known:
        allowed = ", ".join(sorted(known))
        yield f"unexpected inference {role} '{name}', allowed {role}s are: {allowed}"


def _type_problems(
    expected: DataType, role: str, found: Binding, config: ModelConfig
) -> Iterator[str]:
    if found.data_type is not expected:
        yield (
            f"unexpected datatype {expected} for inference {role} '{found.name}', expecting "
            f"{found.data_type} for '{config.name}'"
        )


def _mark_problems(
    tensor: ModelInput | ModelOutput, role: str, found: Binding, config: ModelConfig
) -> Iterator[str]:
    named = f"{role} '{tensor.name}' for model '{config.name}' is"
    if found.on_host and not tensor.is_shape_tensor:
        yield (
            f"{named} a shape tensor but the model configuration doesn't mark it as a shape tensor."
        )
    if tensor.is_shape_tensor and not found.on_host:
        yield f"{named} incorrectly marked as a shape tensor in the model configuration."
    if found.on_host and config.batching:
        yield (
            f"{named} a shape tensor, which is served without batches only: set max_batch_size to "
            f"0 (found {config.max_batch_size}) and give each tensor's whole shape"
        )


def _optional_problems(tensor: ModelInput, config: ModelConfig) -> Iterator[str]:
    if tensor.optional:
        yield (
            f"unable to load model '{config.name}', optional input '{tensor.name}' is not "
            "supported: a TensorRT engine needs every input"
        )


def _input_shape_problems(tensor: ModelInput, found: Binding, config: ModelConfig) -> Iterator[str]:
    if tensor.allow_ragged_batch:
        yield from _unbatched_problems(tensor.name, found, (-1,), config)
    else:
        yield from _shape_problems(tensor, found, config)


def _shape_problems(
    tensor: ModelInput | ModelOutput, found: Binding, config: ModelConfig
) -> Iterator[str]:
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    if not config.batching:
        yield from _unbatched_problems(tensor.name, found, dims, config)
        return
    if not found.dims:
        yield (
            f"model '{config.name}', tensor '{tensor.name}': for the model to support batching the "
            "shape should have at least 1 dimension; but shape expected by the model is "
            f"{format_shape(found.dims)}"
        )
    yield from batched_shape_problems(config.name, tensor.name, found.dims, dims)


def _unbatched_problems(
    name: str, found: Binding, dims: Sequence[int], config: ModelConfig
) -> Iterator[str]:
    scalar = not found.dims and tuple(dims) == (1,)
    if not scalar:
        yield from whole_shape_problems(config.name, name, found.dims, dims)


def _batch_problems(
    config: ModelConfig, signature: Signature, profiles: Sequence[int]
) -> Iterator[str]:
    ragged = any(each.allow_ragged_batch for each in config.input)
    largest = signature.largest_batch(profiles)
    if config.max_batch_size > largest and not ragged:
        yield (
            f"unexpected configuration maximum batch size {config.max_batch_size} for "
            f"'{config.name}', model maximum is {largest}"
        )
