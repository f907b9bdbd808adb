"""Whether a model batches, by Triton's rules for TensorFlow models, in its words."""

from collections.abc import Iterator, Mapping

from gateway.batches.shapes import ANY_SIZE
from gateway.config import ModelConfig, TensorReshape
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor


def batches(config: ModelConfig, signature: ModelSignature) -> bool:
    """Whether the model batches, if the config has no batch size: a size of 0 says neither.

    Raises InferenceError INTERNAL if the config contradicts the model or itself.
    """
    possible = _may_batch(signature)
    if config.batching and not possible:
        raise InferenceError(
            Code.INTERNAL,
            f"unable to autofill for '{config.name}', configuration specified max-batch "
            f"{config.max_batch_size} but model signature does not support batching",
        )
    if config.batching or not possible:
        return possible
    hints = set(_hints(config, signature))
    if len(hints) > 1:
        raise InferenceError(
            Code.INTERNAL,
            f"unable to autofill for '{config.name}', model tensor configurations are "
            "contradicting each other in terms of whether batching is supported",
        )
    return hints != {False}


def _may_batch(signature: ModelSignature) -> bool:
    """Whether the first dimension of every tensor of known rank is of any size."""
    known = [
        each.dims
        for each in (*signature.inputs.values(), *signature.outputs.values())
        if each.dims is not None
    ]
    return bool(known) and all(dims[:1] == (ANY_SIZE,) for dims in known)


def _hints(config: ModelConfig, signature: ModelSignature) -> Iterator[bool]:
    """Whether each listed tensor with dims leaves the batch dimension out."""
    for each in config.input:
        if each.allow_ragged_batch:
            yield True
            continue
        yield from _hint(each.name, _model_dims(each.dims, each.reshape), signature.inputs)
    for output in config.output:
        yield from _hint(output.name, _model_dims(output.dims, output.reshape), signature.outputs)


def _hint(
    name: str, dims: tuple[int, ...] | None, known: Mapping[str, ModelTensor]
) -> Iterator[bool]:
    found = known[name].dims if name in known else None
    if dims is not None and found is not None:
        yield len(found) == len(dims) + 1


def _model_dims(dims: tuple[int, ...], reshape: TensorReshape | None) -> tuple[int, ...] | None:
    """The dims that the model sees; None if the config has none."""
    if not dims:
        return None
    return dims if reshape is None else reshape.shape
