"""One execution of sequences as their instance sees it: with controls, states, and every row."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.backend import Answer, Instance, Note
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.schedulers.scheduler import Entry
from gateway.sequences.inputs import NO_SEQUENCE, ControlInputs, ImplicitStates
from gateway.sequences.ready_requests import Row


class ExecutionInputs:
    """Adds to requests what a sequence batcher adds; prepared once per model."""

    def __init__(self, config: ModelConfig, states: ImplicitStates) -> None:
        self._controls = ControlInputs(config)
        self._states = states

    @property
    def to_the_end(self) -> bool:
        """Whether an execution matters to who comes later: it leaves states behind."""
        return bool(self._states)

    def execution(
        self, instance: Instance, rows: Sequence[Row | None]
    ) -> tuple[Instance, list[Entry]]:
        """Who executes these rows, and what: one entry for each that has a request.

        RowDecision without one execute beside them, and nobody hears of them.
        """
        present = [row for row in rows if row is not None]
        entries = [self._filled(row) for row in present]
        if len(present) == len(rows) and not self._states:
            return instance, entries
        requests = iter([entry.request for entry in entries])
        nobody = self._empty_slot(present[0]) if len(present) < len(rows) else NO_REQUEST
        whole = [nobody if row is None else next(requests) for row in rows]
        return PaddedInstance(instance, rows, whole, self._states), entries

    def _filled(self, row: Row) -> Entry:
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

    def _empty_slot(self, row: Row) -> InferRequest:
        """What stands in a slot that has no request: inputs like those of one that has."""
        request = row.waiting.entry.request
        inputs = (
            request.inputs + self._controls.of_empty_slot() + tuple(row.sequence.states.values())
        )
        return InferRequest(
            model=request.model,
            version=request.version,
            inputs=inputs,
            outputs=self._states.asked(request),
            sequence=NO_SEQUENCE,
        )


NO_REQUEST = InferRequest(model="")


class PaddedInstance(Instance):
    """An instance for one execution with rows of nobody's, or with states in its answers."""

    def __init__(
        self,
        instance: Instance,
        rows: Sequence[Row | None],
        whole: Sequence[InferRequest],
        states: ImplicitStates,
    ) -> None:
        self._instance = instance
        self._rows = rows
        self._whole = whole
        self._states = states

    @property
    def origin(self) -> Instance:
        return self._instance

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return self._instance.alive

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        """Answer the requests, which are those of the rows that have one, in their order."""
        places = iter(range(len(requests)))
        indices = [None if row is None else next(places) for row in self._rows]
        async with aclosing(self._instance.execute(self._whole)) as answers:
            async for number, answer in answers:
                index, row = indices[number], self._rows[number]
                if answer is Note.FREED:
                    yield 0, answer
                elif row is not None and index is not None:
                    yield index, self._without_states(answer, row)

    def waits_for(self, requests: Sequence[InferRequest]) -> Iterable[str]:
        return self._instance.waits_for(requests)

    def left(self, requests: Sequence[InferRequest]) -> None:
        self._instance.left(requests)

    def stop(self, request: InferRequest) -> bool:
        return self._instance.stop(request)

    async def close(self) -> None:
        """What executes is closed by whoever has loaded it."""

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
