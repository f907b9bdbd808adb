"""Text deltas from the engine's steps, without vLLM's objects and tasks.

For each output of a step vLLM makes three objects, and wakes the task that waits for them. A plain
delta of a text needs neither. This module is all that depends on vLLM's output processor; where it
finds another one than that of vLLM 0.32, the outputs go vLLM's way.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestState

from backends.vllm.token_texts import TokenTexts, token_texts
from gateway.event_loop import WRITES
from gateway.messages import Sink

STEPS = "diverted_steps"
"""The attribute of vLLM's output processor with what is in front of it."""

OF_STATE = (
    *("request_id", "output_kind", "parent_req", "stream_interval", "streaming_input"),
    *("is_prefilling", "stats", "weight_version_starts", "sampling_mask_chunks"),
)
OF_DETOKENIZER = ("stop", "update", "get_next_output_text")
"""The names of vLLM's that are used; of another release, the outputs go vLLM's way."""

TakeDelta = Callable[[str, int], None]
"""Takes the text and the number of tokens of a delta."""


class DivertedDeltas:
    """The plain deltas of one request, passed to a function in the step that makes them.

    A delta is plain if it has tokens and nothing else, and does not end the text. It is diverted
    while `waiting` is set, the sink has room, and no earlier output is unread. `count` is the
    number of diverted ones.

    A step of the engine calls `take`. With stop strings, which only vLLM's detokenizer finds, its
    processor makes the text, and calls `make_request_output`.

    The text of a token that follows complete characters is looked up. vLLM's decoder does not see
    that token, which changes no later text: behind complete characters each text is that of its
    tokens alone.
    """

    def __init__(
        self, state: Any, collector: Any, steps: "DivertedSteps", take: TakeDelta, sink: Sink
    ) -> None:
        self.waiting = False
        self.count = 0
        self._tokens: list[int] = []
        self._state = state
        detokenizer = state.detokenizer
        self._text = detokenizer.get_next_output_text
        self._update: Any = None
        self._decode: Any = None
        self._ids: list[int] = []
        self._texts: TokenTexts | None = None
        self._at_character_end = False
        self._statistics = state.stats
        self._versions = state.weight_version_starts
        self._plain = EngineCoreOutput(state.request_id, [])
        self._collector = collector
        self._steps = steps
        self._take_delta = take
        self._sink = sink
        if detokenizer.stop:
            self._make = state.make_request_output
            state.make_request_output = self._make_request_output
        else:
            self._update = detokenizer.update
            if type(detokenizer) is FastIncrementalDetokenizer:
                self._decode, self._ids = detokenizer.decode_next, detokenizer.token_ids
                if detokenizer.spaces_between_special_tokens:
                    self._texts = steps.token_texts(detokenizer.tokenizer)
            steps.requests[state.request_id] = self

    def taken(self) -> list[int]:
        """The tokens of the deltas since the last call."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def end(self) -> None:
        """Let all further outputs go vLLM's way; idempotent."""
        self.waiting = False
        state, self._state = self._state, None
        if state is None:
            return
        if self._steps.requests.pop(state.request_id, None) is None:
            del state.make_request_output, self._make
        self._text = self._update = self._decode = self._statistics = None
        self._versions = self._collector = self._texts = None
        self._ids = []

    def take(self, output: EngineCoreOutput, at: float, counts: Any, version: Any) -> bool:
        """Divert an output as vLLM's processor would process it; False if it has to.

        `at` is the step's monotonic time, `counts` vLLM's `IterationStats`, `version` that of the
        weights.
        """
        tokens, plain, versions = output.new_token_ids, self._plain, self._versions
        plain.new_token_ids = tokens
        if (
            not self._may_take(tokens)
            or output.routed_experts is not None  # an array, which cannot be compared
            or output != plain
            or (version is not None and (not versions or versions[-1][0] != version))
        ):
            self._at_character_end = False
            return False
        if counts is not None:
            # As `IterationStats.update_from_output` counts a plain output behind the first one.
            known, count = self._statistics, len(tokens)
            counts.num_generation_tokens += count
            counts.inter_token_latencies_iter.append(at - known.last_token_ts)
            known.num_generation_tokens += count
            known.last_token_ts = at
        self._divert(tokens)
        return True

    def _make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """As `RequestState.make_request_output`; None if the delta was diverted."""
        masked = self._state.sampling_mask_chunks
        if finish_reason is None and not masked and self._may_take(new_token_ids):
            self._divert(new_token_ids)
            return None
        return self._make(new_token_ids, pooling_output, finish_reason, *rest, **named)

    def _may_take(self, tokens: Sequence[int]) -> bool:
        unread = self._collector.output is not None
        return bool(self.waiting and tokens and not unread and self._sink.has_room)

    def _divert(self, tokens: list[int]) -> None:
        self.count += 1
        self._tokens += tokens
        try:
            text = ""
            if self._at_character_end and self._texts is not None and len(tokens) == 1:
                text = self._texts[tokens[0]]
            if text:
                self._ids += tokens
            else:
                text = self._decoded(tokens)
            self._take_delta(text, len(tokens))
        except Exception as error:  # noqa: BLE001 - raised by the task of this request
            self._collector.put(error)

    def _decoded(self, tokens: list[int]) -> str:
        """The text by vLLM's detokenizer, of which it keeps parts of a character for later."""
        if self._decode is None:
            if self._update is not None:
                self._update(tokens, False)
            text: str = self._text(False, True)
            return text
        # As `update` and `get_next_output_text`, which also copy the text so far.
        self._ids += tokens
        texts = [*map(self._decode, tokens)]
        self._at_character_end = bool(texts[-1])
        return "".join(texts)


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(signature(function).parameters)


class DivertedSteps:
    """The steps of one engine, in front of its output processor.

    Outputs of `requests`, by their internal ids, are offered to them first. The texts of a step are
    written once all of them are made.
    """

    def __init__(self, processor: Any) -> None:
        self.requests: dict[str, DivertedDeltas] = {}
        self._tokenizer: Any = None
        self._texts: TokenTexts | None = None
        self._process = processor.process_outputs
        processor.process_outputs = self.process_outputs
        setattr(processor, STEPS, self)

    def token_texts(self, tokenizer: Any) -> TokenTexts | None:
        """The texts of the tokens of the engine's tokenizer, one object for all requests."""
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._texts = tokenizer, token_texts(tokenizer)
        return self._texts

    def process_outputs(
        self,
        engine_core_outputs: Sequence[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> Any:
        """As `OutputProcessor.process_outputs`, which gets the outputs that are not diverted."""
        requests, at = self.requests, engine_core_timestamp or 0.0
        left = engine_core_outputs
        if requests:
            with WRITES:
                left = [
                    output
                    for output in engine_core_outputs
                    if (found := requests.get(output.request_id)) is None
                    or not found.take(output, at, iteration_stats, weight_version)
                ]
        return self._process(left, engine_core_timestamp, iteration_stats, weight_version)


PARAMETERS = _parameters(DivertedSteps.process_outputs)[1:]


def divert(
    engine: Any, collector: Any, take: TakeDelta, sink: Sink | None
) -> DivertedDeltas | None:
    """Divert the plain deltas of a submitted request; None if they go vLLM's way.

    `collector` is the result of `AsyncLLM.add_request`.
    """
    processor = getattr(engine, "output_processor", None)
    states = getattr(processor, "request_states", {})
    state = states.get(collector.request_id)
    if sink is None or type(state) is not RequestState or not _is_known(state):
        return None
    steps = _steps_of(processor)
    if steps is None or not _is_plain(state):
        return None
    return DivertedDeltas(state, collector, steps, take, sink)


def _steps_of(processor: Any) -> DivertedSteps | None:
    """Those of the processor, which the first diverted request puts in front of it."""
    found: DivertedSteps | None = getattr(processor, STEPS, None)
    if found is None and _parameters(processor.process_outputs) == PARAMETERS:
        return DivertedSteps(processor)
    return found


def _is_known(state: Any) -> bool:
    """Whether a request has what this module uses; without a tokenizer it has no such text."""
    detokenizer = getattr(state, "detokenizer", None)
    return all(hasattr(state, name) for name in OF_STATE) and all(
        hasattr(detokenizer, name) for name in OF_DETOKENIZER
    )


def _is_plain(state: Any) -> bool:
    """Whether its outputs are deltas of one text, each with the tokens of one step."""
    return (
        state.output_kind == RequestOutputKind.DELTA
        and state.parent_req is None
        and state.stream_interval == 1
        and not state.streaming_input
        and not state.is_prefilling
    )
