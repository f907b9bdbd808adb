"""Inputs and outputs of a model file, as its runtime declares them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gateway.batches.shapes import ANY_SIZE
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One input or output of a model.

    `kind` is the runtime's own name of its type, `found_type` the protocol's: None if it has none,
    TYPE_INVALID if the file does not define it. -1 in `dims` is any size. The dims of a scalar are
    empty; they are None if the file does not define them.
    """

    name: str
    kind: str
    found_type: DataType | None
    dims: tuple[int, ...] | None

    @property
    def data_type(self) -> DataType:
        """Its data type; InferenceError UNSUPPORTED if the protocol has no such tensor."""
        if self.found_type is None:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"'{self.name}' of the model is a {self.kind}; only tensors of the protocol's "
                "datatypes can be served",
            )
        return self.found_type


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """All inputs and outputs by name; `defaults` are inputs that may be given too."""

    inputs: Mapping[str, ModelTensor]
    outputs: Mapping[str, ModelTensor]
    defaults: Mapping[str, ModelTensor] = field(default_factory=dict)

    @property
    def batches(self) -> bool:
        """Whether the first dimension of every input and output is of any size."""
        every = (*self.inputs.values(), *self.outputs.values())
        return all((tensor.dims or ())[:1] == (ANY_SIZE,) for tensor in every)


def input_names(config: ModelConfig) -> tuple[str, ...]:
    """All inputs of the model: the config's, and those that the server derives or adds."""
    return (
        *(each.name for each in config.input),
        *(name for each in config.batch_input for name in each.target_name),
        *_sequence_inputs(config),
    )


def output_names(config: ModelConfig) -> tuple[str, ...]:
    """All outputs of the model: the config's, and further states."""
    names = [each.name for each in config.output]
    states = config.sequence_batching.state if config.sequence_batching else ()
    return (*names, *(each.output_name for each in states if each.output_name not in names))


def _sequence_inputs(config: ModelConfig) -> Iterator[str]:
    if config.sequence_batching is not None:
        yield from (each.name for each in config.sequence_batching.control_input)
        yield from (each.input_name for each in config.sequence_batching.state)
