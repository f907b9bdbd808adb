"""What does a sequence hand from each of its requests to the next? Its implicit state.

`ModelSequenceBatching.state` of the model configuration: before a request the stored tensors are
among its inputs; those that the model answers take their place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gateway.batches.shapes import Reshapes
from gateway.config import ModelConfig
from gateway.config.scheduling import State
from gateway.messages import InferRequest, InferResponse, RequestedOutput
from gateway.tensor import SIZES, Datatype, Tensor

INITIAL_ANY_SIZE = 1
"""A dimension of any size in a state that has no value yet."""


class States:
    """The states of one model; `initial` are the values its config gives, by the input's name."""

    def __init__(self, config: ModelConfig, initial: Mapping[str, Tensor]) -> None:
        batching = config.sequence_batching
        states = batching.state if batching else ()
        self._inputs = {each.output_name: each.input_name for each in states}
        self._initial = {
            each.input_name: initial.get(each.input_name) or _blank(each, batched=config.batching)
            for each in states
        }
        self._shown = frozenset(each.name for each in config.output)
        self._every = tuple([RequestedOutput(each.name) for each in config.output])
        self._requested = tuple([RequestedOutput(name) for name in self._inputs])
        self._reshapes = Reshapes(config)
        self._variable = tuple([each.input_name for each in states if -1 in each.dims])

    def __bool__(self) -> bool:
        return bool(self._inputs)

    @property
    def initial(self) -> Mapping[str, Tensor]:
        """What a sequence begins with."""
        return self._initial

    def shapes(self, states: Mapping[str, Tensor]) -> tuple[tuple[int, ...], ...]:
        """The shapes that may differ: requests with different ones share no batch."""
        return tuple([states[name].shape for name in self._variable])

    def asked(self, request: InferRequest) -> tuple[RequestedOutput, ...]:
        """The outputs that the model has to answer, its states among them.

        Where there are states all are named: to some runtimes no name means those of the config.
        """
        if not self._inputs:
            return request.outputs
        asked = request.outputs or self._every
        names = {output.name for output in asked}
        return (*asked, *(each for each in self._requested if each.name not in names))

    def take(
        self, response: InferResponse, request: InferRequest, *, shared: bool
    ) -> tuple[InferResponse, dict[str, Tensor]]:
        """What of a response the client gets, and the states in it by their inputs' names.

        States of an execution that is `shared` are copied: as views they would keep the others'.
        """
        asked = {output.name for output in request.outputs} or self._shown
        found = {
            self._inputs[tensor.name]: _stored(self._inputs[tensor.name], tensor, shared)
            for tensor in self._reshapes.as_made(response)
            if tensor.name in self._inputs
        }
        if found and not asked.issuperset(self._inputs):
            hidden = self._inputs.keys() - asked
            seen = tuple([each for each in response.outputs if each.name not in hidden])
            response = replace(response, outputs=seen)
        return response, found


def _blank(state: State, *, batched: bool) -> Tensor:
    dims = tuple([INITIAL_ANY_SIZE if dim == -1 else dim for dim in state.dims])
    shape = (1, *dims) if batched else dims
    return zeros(state.input_name, state.data_type.datatype, shape)


def zeros(name: str, datatype: Datatype, shape: Sequence[int]) -> Tensor:
    """A tensor of zeros, or of empty strings."""
    found = Tensor(name, datatype, tuple(shape), b"")
    if datatype is Datatype.BYTES:
        return replace(found, data=(b"",) * found.count)
    return replace(found, data=bytes(found.count * SIZES[datatype]))


def _stored(name: str, tensor: Tensor, shared: bool) -> Tensor:
    data = tensor.data
    if shared and not isinstance(data, tuple):
        data = bytes(tensor.raw())
    return Tensor(name, tensor.datatype, tensor.shape, data)
