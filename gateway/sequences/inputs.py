"""Executions of sequences: control inputs, implicit states, and rows for empty slots."""

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import product
from pathlib import Path

from gateway.backend import Answer, Instance, Note
from gateway.batches.shapes import Reshapes
from gateway.batches.stacking import control_type
from gateway.config import ModelConfig
from gateway.config.scheduling import Control, ControlKind, InitialState, State
from gateway.data_files import DataFiles
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput, SequenceTag
from gateway.schedulers.execution import Entry
from gateway.schedulers.sequence_call import SequenceCall
from gateway.sequences.ready_requests import Row
from gateway.tensor import SIZES, Datatype, Tensor

NO_SEQUENCE = SequenceTag(0)
NO_REQUEST = InferRequest(model="")
INITIAL_ANY_SIZE = 1
"""The size of a variable dimension in an initial state."""
MAX_BYTES = 2**31 - 1
"""Limit of an initial state's file, in bytes: that of a gRPC message."""


class ControlInputs:
    """The control tensors of one model (`ModelSequenceBatching.control_input`).

    Each has shape [1], after a batch dimension of 1 if the model batches.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.batching else (1,)
        self._flags: dict[tuple[bool, bool, bool], tuple[Tensor, ...]] = {}
        self._ids: list[tuple[str, Datatype]] = []
        signals: list[tuple[str, Control]] = []
        for name, control in controls_of(config):
            if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
                self._ids.append((name, control.data_type.datatype))
            else:
                signals.append((name, control))
        for start, end, ready in product((False, True), repeat=3):
            flags = (start, end, ready)
            self._flags[flags] = tuple([self._signal(*each, flags) for each in signals])

    def of(self, tag: SequenceTag) -> tuple[Tensor, ...]:
        """The control tensors of a request."""
        return self._flags[tag.start, tag.end, True] + self._id_tensors(tag.correlation_id)

    def of_empty_slot(self) -> tuple[Tensor, ...]:
        """The control tensors of an empty slot."""
        return self._flags[False, False, False] + self._id_tensors(0)

    def _signal(self, name: str, control: Control, flags: tuple[bool, bool, bool]) -> Tensor:
        datatype = control_type(control).datatype
        return Tensor(name, datatype, self._shape, _value(control, flags[_PLACES[control.kind]]))

    def _id_tensors(self, correlation_id: int | str) -> tuple[Tensor, ...]:
        return tuple(
            [
                Tensor(name, datatype, self._shape, _id_data(datatype, correlation_id))
                for name, datatype in self._ids
            ]
        )


_PLACES = {
    ControlKind.CONTROL_SEQUENCE_START: 0,
    ControlKind.CONTROL_SEQUENCE_END: 1,
    ControlKind.CONTROL_SEQUENCE_READY: 2,
}


def controls_of(config: ModelConfig) -> Iterator[tuple[str, Control]]:
    """Each control of the model with the name of its tensor."""
    batching = config.sequence_batching
    for each in batching.control_input if batching else ():
        for control in each.control:
            yield each.name, control


def _value(control: Control, truth: bool) -> bytes:
    if control.int32_false_true:
        return struct.pack("<i", control.int32_false_true[truth])
    if control.fp32_false_true:
        return struct.pack("<f", control.fp32_false_true[truth])
    return struct.pack("<?", control.bool_false_true[truth])


def _id_data(datatype: Datatype, correlation_id: int | str) -> bytes | tuple[bytes, ...]:
    """The id as tensor data; as in Triton, the low bytes of a number that is too long."""
    if datatype is Datatype.BYTES:
        return (str(correlation_id or "").encode("utf-8", "surrogatepass"),)
    size: int = SIZES[datatype]
    return (int(correlation_id) % (1 << 8 * size)).to_bytes(size, "little")


class ImplicitStates:
    """The implicit states of one model (`ModelSequenceBatching.state`).

    Each request has the stored states among its inputs; the states in its response replace them.
    `initial` has the values of the config, by names of inputs.
    """

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
        """The states at the start of a sequence."""
        return self._initial

    def shapes(self, states: Mapping[str, Tensor]) -> tuple[tuple[int, ...], ...]:
        """The shapes of variable states; requests with different shapes share no batch."""
        return tuple([states[name].shape for name in self._variable])

    def asked(self, request: InferRequest) -> tuple[RequestedOutput, ...]:
        """The outputs to request from the model, with its states.

        All outputs are named if there are states: without names some runtimes compute only those
        of the config.
        """
        if not self._inputs:
            return request.outputs
        asked = request.outputs or self._every
        names = {output.name for output in asked}
        return (*asked, *(each for each in self._requested if each.name not in names))

    def take(
        self, response: InferResponse, request: InferRequest, *, shared: bool
    ) -> tuple[InferResponse, dict[str, Tensor]]:
        """The client's part of a response, and the states in it by names of inputs.

        With `shared`, states are copied: a view would keep the memory of the whole batch.
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


class InitialStates:
    """The states of one model; their initial values are read again for each new instance.

    `folder` is the model's.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        self.states = ImplicitStates(config, {})
        self._config = config
        self._folder = folder

    async def prepare(self, instance: Instance) -> None:
        """Read the files; InferenceError with Triton's texts."""
        batching = self._config.sequence_batching
        if batching is not None and any(state.initial_state for state in batching.state):
            initial = await asyncio.to_thread(read_initial_states, self._config, self._folder)
            self.states = ImplicitStates(self._config, initial)


def read_initial_states(config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """The initial states of a checked config, by names of inputs. Blocks on files.

    `folder` is the model's, with its `initial_state/`. Raises InferenceError with Triton's texts:
    INVALID_ARG, or INTERNAL for a file that cannot be read.
    """
    batching = config.sequence_batching
    return {
        state.input_name: _read(config, state, state.initial_state[0], folder)
        for state in (batching.state if batching else ())
        if state.initial_state
    }


def _read(config: ModelConfig, state: State, given: InitialState, folder: Path) -> Tensor:
    datatype = given.data_type.datatype
    shape = (1, *given.dims) if config.batching else given.dims
    if given.data_file is None:
        return zeros(state.input_name, datatype, shape)
    files = DataFiles(config.name, folder, "initial_state", "initial state")
    data = files.read(given.data_file, MAX_BYTES)
    tensor = Tensor(state.input_name, datatype, shape, data)
    if datatype is Datatype.BYTES:
        return _strings(tensor, given.data_file)
    expected = math.prod(shape) * SIZES[datatype]
    if len(data) < expected:
        # The missing space is Triton's.
        raise InferenceError(
            Code.INVALID_ARG,
            f"initial_state setting expects {expected} bytes, but the data provided from "
            f"{given.data_file}only has {len(data)} bytes.",
        )
    return Tensor(state.input_name, datatype, shape, data[:expected])


def _strings(tensor: Tensor, filename: str) -> Tensor:
    elements = tensor.elements()
    if len(elements) != tensor.count:
        raise InferenceError(
            Code.INVALID_ARG,
            f"initial_state setting expects {tensor.count} string elements, but the data provided "
            f"from {filename} has {len(elements)}",
        )
    return Tensor(tensor.name, tensor.datatype, tensor.shape, elements)


class ExecutionInputs:
    """Adds control inputs, states and padding rows to executions; prepared once per model."""

    def __init__(self, config: ModelConfig, states: ImplicitStates) -> None:
        self._controls = ControlInputs(config)
        self._states = states
        self._unpadded = SequenceCall(runs_to_end=bool(states))

    def prepare(
        self, instance: Instance, rows: Sequence[Row | None]
    ) -> tuple[list[Entry], SequenceCall]:
        """One entry for each row that has a request, and how the instance is called."""
        present = [row for row in rows if row is not None]
        entries = [self._entry(row) for row in present]
        if len(present) == len(rows) and not self._states:
            return entries, self._unpadded
        requests = iter([entry.request for entry in entries])
        padding = self._padding(present[0]) if len(present) < len(rows) else NO_REQUEST
        padded = [padding if row is None else next(requests) for row in rows]
        execution = PaddedExecution(instance, rows, padded, self._states)
        padding_rows = len(rows) - len(present)
        return entries, SequenceCall(execution.execute, padding_rows, bool(self._states))

    def _entry(self, row: Row) -> Entry:
        entry = row.waiting.entry
        request, states = entry.request, self._states
        tag = request.sequence or NO_SEQUENCE
        inputs = request.inputs + self._controls.of(tag)
        if states:
            if tag.start or not row.sequence.states:
                row.sequence.states = states.initial
            inputs += tuple(row.sequence.states.values())
            request = replace(request, inputs=inputs, outputs=states.asked(request))
        elif len(inputs) > len(request.inputs):
            request = replace(request, inputs=inputs)
        else:
            return entry
        return Entry(request, entry.stream, entry.record)

    def _padding(self, row: Row) -> InferRequest:
        """The request for an empty slot: the inputs of a present row, with READY off."""
        request = row.waiting.entry.request
        states = tuple(row.sequence.states.values())
        return InferRequest(
            model=request.model,
            version=request.version,
            inputs=request.inputs + self._controls.of_empty_slot() + states,
            outputs=self._states.asked(request),
            sequence=NO_SEQUENCE,
        )


class PaddedExecution:
    """One call of an instance with a request for every slot; keeps the states it answers."""

    def __init__(
        self,
        instance: Instance,
        rows: Sequence[Row | None],
        padded: Sequence[InferRequest],
        states: ImplicitStates,
    ) -> None:
        self._instance = instance
        self._rows = rows
        self._padded = padded
        self._states = states

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        """Answer the requests, which are those of the rows that have one, in their order."""
        places = iter(range(len(requests)))
        indices = [None if row is None else next(places) for row in self._rows]
        async with aclosing(self._instance.execute(self._padded)) as answers:
            async for number, answer in answers:
                index, row = indices[number], self._rows[number]
                if answer is Note.FREED:
                    yield 0, answer
                elif row is not None and index is not None:
                    yield index, self._without_states(answer, row)

    def _without_states(
        self, answer: InferResponse | InferenceError | Note, row: Row
    ) -> InferResponse | InferenceError | Note:
        if not self._states or not isinstance(answer, InferResponse):
            return answer
        request = row.waiting.entry.request
        answer, found = self._states.take(answer, request, shared=len(self._rows) > 1)
        if found:
            row.sequence.states = {**row.sequence.states, **found}
        return answer
