"""Executions of sequences: control inputs, implicit states, and rows for empty slots."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.backend import Answer, Instance, Note
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.schedulers.execution import Entry, SequenceCall
from gateway.sequences.inputs import NO_SEQUENCE, ControlInputs, ImplicitStates
from gateway.sequences.ready_requests import Row

NO_REQUEST = InferRequest(model="")


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
