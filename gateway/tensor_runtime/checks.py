"""Checks of a config against its model, by Triton's rules, in its words."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.batches.shapes import ANY_SIZE, batched_shape_problems, whole_shape_problems
from gateway.batches.stacking import sequence_inputs, with_sequence_tensors
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor


@dataclass(frozen=True, slots=True)
class CheckRules:
    """Rules that differ between runtimes; the defaults are those for ONNX models.

    `spare_inputs`: the model may have inputs that the config omits. `exact_outputs`: the config's
    dims of outputs equal the model's. `free_ranks`: a tensor of no dims has those of the config.
    """

    spare_inputs: bool = False
    exact_outputs: bool = False
    free_ranks: bool = False


ONNX_RULES = CheckRules()


def check(config: ModelConfig, signature: ModelSignature, rules: CheckRules = ONNX_RULES) -> None:
    """Raise INVALID_ARG for the first contradiction.

    A model may have more outputs than the config lists.
    """
    raise_first(_problems(config, signature, rules))


def raise_first(problems: Iterator[str]) -> None:
    """Raise INVALID_ARG for the first problem, if there is one."""
    if problem := next(problems, ""):
        raise InferenceError(Code.INVALID_ARG, problem)


def _problems(config: ModelConfig, signature: ModelSignature, rules: CheckRules) -> Iterator[str]:
    yield from control_problems(config, signature.inputs)
    if rules.spare_inputs:
        yield from _excess_problems(config, len(signature.inputs))
    else:
        yield from count_problems(config, len(signature.inputs), signature.defaults)
    for each in config.input:
        yield from _input_problems(each, config, signature, rules)
    for batch_input in config.batch_input:
        for name in batch_input.target_name:
            yield from name_problems(name, "input", signature.inputs)
            yield from _type_problems(
                name, "input", batch_input.data_type, signature.inputs[name], config
            )
    for output in config.output:
        yield from _output_problems(output, config, signature, rules)
    yield from _sequence_problems(config, signature, rules)


def control_problems(config: ModelConfig, inputs: Iterable[str]) -> Iterator[str]:
    """The sequence controls that are not among the model's inputs."""
    batching = config.sequence_batching
    for each in batching.control_input if batching else ():
        if each.name not in inputs:
            yield (
                f"configuration specified sequence control '{each.name}', but model does not "
                "provide that input"
            )


def _sequence_problems(
    config: ModelConfig, signature: ModelSignature, rules: CheckRules
) -> Iterator[str]:
    """Controls and states are checked like other tensors."""
    if config.sequence_batching is None:
        return
    for tensor in sequence_inputs(config.sequence_batching):
        yield from _input_problems(tensor, config, signature, rules)
    for output in with_sequence_tensors(config).output[len(config.output) :]:
        yield from _output_problems(output, config, signature, rules)


def count_problems(config: ModelConfig, found: int, defaults: Iterable[str] = ()) -> Iterator[str]:
    """The difference of the number of inputs, without those in `defaults`, from the model's."""
    expected = _expected_inputs(config, defaults)
    if expected != found:
        yield (
            f"unable to load model '{config.name}', configuration expects {expected} inputs, "
            f"model provides {found}"
        )


def _expected_inputs(config: ModelConfig, defaults: Iterable[str] = ()) -> int:
    batching = config.sequence_batching
    names = {each.name for each in config.input}.difference(defaults)
    names.update(name for each in config.batch_input for name in each.target_name)
    names.update(each.name for each in (sequence_inputs(batching) if batching else ()))
    return len(names)


def _excess_problems(config: ModelConfig, found: int) -> Iterator[str]:
    expected = _expected_inputs(config)
    if expected > found:
        yield (
            f"unable to load model '{config.name}', configuration expects {expected} inputs, "
            f"model provides at most {found}"
        )


def _input_problems(
    tensor: ModelInput, config: ModelConfig, signature: ModelSignature, rules: CheckRules
) -> Iterator[str]:
    known = {**signature.inputs, **signature.defaults}
    yield from name_problems(tensor.name, "input", known)
    found = known[tensor.name]
    yield from _optional_problems(tensor, config)
    yield from _type_problems(tensor.name, "input", tensor.data_type, found, config)
    if rules.free_ranks and not found.dims:
        return
    if tensor.allow_ragged_batch:
        yield from whole_shape_problems(config.name, tensor.name, found.dims or (), (ANY_SIZE,))
    else:
        yield from _shape_problems(tensor, found, config)


def _output_problems(
    tensor: ModelOutput, config: ModelConfig, signature: ModelSignature, rules: CheckRules
) -> Iterator[str]:
    yield from name_problems(tensor.name, "output", signature.outputs)
    found = signature.outputs[tensor.name]
    yield from _type_problems(tensor.name, "output", tensor.data_type, found, config)
    scattered = {name for each in config.batch_output for name in each.target_name}
    if tensor.name in scattered or (rules.free_ranks and not found.dims):
        return
    yield from _shape_problems(tensor, found, config)
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    whole = (ANY_SIZE, *dims) if config.batching else dims
    if rules.exact_outputs and found.dims != whole:
        yield (
            f"model '{config.name}', tensor '{tensor.name}': the model computes shape "
            f"{format_shape(found.dims or ())} but the model configuration specifies shape "
            f"{format_shape(whole)}"
        )


def name_problems(name: str, role: str, known: Iterable[str]) -> Iterator[str]:
    """A name that the model does not know."""
    if name not in known:
        allowed = ", ".join(sorted(known))
        yield f"unexpected inference {role} '{name}', allowed {role}s are: {allowed}"


def _optional_problems(tensor: ModelInput, config: ModelConfig) -> Iterator[str]:
    if tensor.optional and config.batching:
        yield (
            f"unable to load model '{config.name}', optional input '{tensor.name}' is not "
            "supported for models that support batching"
        )
    if tensor.optional and tensor.allow_ragged_batch:
        yield (
            f"unable to load model '{config.name}', optional input '{tensor.name}' cannot allow "
            "ragged batches"
        )


def _type_problems(
    name: str, role: str, expected: DataType, found: ModelTensor, config: ModelConfig
) -> Iterator[str]:
    if found.data_type is not expected:
        yield (
            f"unable to load model '{config.name}', configuration expects datatype {expected} for "
            f"{role} '{name}', model provides {found.data_type}"
        )


def _shape_problems(
    tensor: ModelInput | ModelOutput, found: ModelTensor, config: ModelConfig
) -> Iterator[str]:
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    shape = found.dims or ()
    if not config.batching:
        yield from whole_shape_problems(config.name, tensor.name, shape, dims)
        return
    if shape[:1] != (ANY_SIZE,):
        yield (
            f"model '{config.name}', tensor '{tensor.name}': for the model to support batching the "
            "shape should have at least 1 dimension and the first dimension must be -1; but shape "
            f"expected by the model is {format_shape(shape)}"
        )
    yield from batched_shape_problems(config.name, tensor.name, shape, dims)
