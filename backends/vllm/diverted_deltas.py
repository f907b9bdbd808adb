"""Text deltas from the engine's steps, without vLLM's objects and tasks.

For each output of a step vLLM makes three objects, and wakes the task that waits for them. A plain
delta of a text needs neither. This module is all that depends on vLLM's output processor; where it
finds another one than that of vLLM 0.32, the outputs go vLLM's way.
"""

from collections.abc import Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestState

from gateway.messages import Sink

TakeDelta = Callable[[str, int], None]
"""Takes the text and the number of tokens of a delta."""


class DivertedDeltas:
    """The plain deltas of one request, passed to a function in the step that makes them.

    A delta is plain if it has tokens and does not end the text. It is diverted while `waiting` is
    set, the sink has room, and no earlier output is unread. `count` is the number of diverted ones.
    """

    __slots__ = ("_collector", "_make", "_sink", "_state", "_take", "_tokens", "count", "waiting")

    def __init__(self, state: Any, collector: Any, take: TakeDelta, sink: Sink) -> None:
        self.waiting = False
        self.count = 0
        self._tokens: list[int] = []
        self._state = state
        self._collector = collector
        self._take = take
        self._sink = sink
        self._make = state.make_request_output
        state.make_request_output = self._make_request_output

    def taken(self) -> list[int]:
        """The tokens of the deltas since the last call."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def end(self) -> None:
        """Let all further outputs go vLLM's way; idempotent."""
        self.waiting = False
        if self._state is not None:
            del self._state.make_request_output
            self._state = self._make = self._collector = None

    def _make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """As `RequestState.make_request_output`; None if the delta was diverted."""
        state = self._state
        if (
            self.waiting
            and finish_reason is None
            and new_token_ids
            and self._collector.output is None
            and not state.sampling_mask_chunks
            and self._sink.has_room
        ):
            self.count += 1
            self._tokens += new_token_ids
            try:
                self._take(state.detokenizer.get_next_output_text(False, True), len(new_token_ids))
            except Exception as error:  # noqa: BLE001 - raised by the task of this request
                self._collector.put(error)
            return None
        return self._make(new_token_ids, pooling_output, finish_reason, *rest, **named)


def divert(
    engine: Any, collector: Any, take: TakeDelta, sink: Sink | None
) -> DivertedDeltas | None:
    """Divert the plain deltas of a submitted request; None if they go vLLM's way.

    `collector` is the result of `AsyncLLM.add_request`.
    """
    processor = getattr(engine, "output_processor", None)
    states = getattr(processor, "request_states", {})
    state = states.get(collector.request_id)
    if sink is None or type(state) is not RequestState or not _is_plain(state):
        return None
    return DivertedDeltas(state, collector, take, sink)


def _is_plain(state: Any) -> bool:
    """Whether its outputs are deltas of one text, each with the tokens of one step."""
    return (
        state.output_kind == RequestOutputKind.DELTA
        and state.parent_req is None
        and state.stream_interval == 1
        and not state.streaming_input
        and state.detokenizer is not None
    )
