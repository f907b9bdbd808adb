"""The sequences of one request, with a stand-in for the engine."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sluice_llm.request import Mistake

from backends.openvino_genai.worker.sluice_openvino_genai.generation import (
    AnswerSequence,
    RunningGeneration,
)
from backends.openvino_genai.worker.sluice_openvino_genai.sampling import Sampling

END = 2
LONG, SHORT = 33, 32
"""Prompts with and without a whole block that the cache keeps."""


class Handle:
    """One sequence in the engine: the tokens that it has made since they were read."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.reason = "NONE"
        self.cancelled = False

    def can_read(self) -> bool:
        return bool(self.made)

    def read(self) -> dict[int, Any]:
        made, self.made = self.made, []
        reason = SimpleNamespace(name=self.reason)
        output = SimpleNamespace(
            generated_ids=made, generated_log_probs=[-1.0] * len(made), finish_reason=reason
        )
        return {0: output}

    def get_status(self) -> Any:
        return SimpleNamespace(name="RUNNING")

    def cancel(self) -> None:
        self.cancelled = True


class Reader:
    """Writes tokens as numbers."""

    def read(self, tokens: Sequence[int], *, final: bool) -> str:
        return "".join(map(str, tokens))


class Engine:
    """Has room for a number of sequences."""

    def __init__(self, room: int = 99) -> None:
        self.handles: list[Handle] = []
        self._room = room

    def add(self) -> Handle:
        if len(self.handles) >= self._room:
            raise Mistake("the engine is full")
        self.handles.append(Handle())
        return self.handles[-1]


def generation(engine: Engine, prompt_tokens: int = LONG, *, stream: bool = False) -> Any:
    """A request of three sequences; `sent` has its responses."""
    tokens: Any = SimpleNamespace(ends=frozenset({END}), reader=lambda **_: Reader())
    sent: list[Any] = []
    sender = SimpleNamespace(send=lambda response, _: sent.append(response))
    writer: Any = SimpleNamespace(responses=lambda deltas, *_, **__: [deltas])
    sequences = [AnswerSequence(each, engine.add, Sampling(), tokens) for each in range(3)]
    found: Any = RunningGeneration(sender, writer, sequences, prompt_tokens)
    found.stream, found.room, found.sent = stream, 99, sent
    return found


def test_the_first_sequence_computes_the_prompt_of_all() -> None:
    engine = Engine()
    running = generation(engine, stream=True)
    running.begin()
    assert not running.deliver()
    assert (len(engine.handles), running.open_sequences) == (1, 3)
    engine.handles[0].made = [7]
    assert not running.deliver()
    assert (len(engine.handles), running.open_sequences, running.tokens) == (3, 3, 1)
    for handle in engine.handles:
        handle.made, handle.reason = [8, END], "STOP"
    assert running.deliver()
    assert len(engine.handles) == 3
    assert (running.open_sequences, running.tokens) == (0, 7)
    texts = ["".join(d.text for row in running.sent for d in row if d.index == n) for n in range(3)]
    assert texts == ["78", "8", "8"]


def test_a_first_sequence_of_one_token_does_not_end_the_request() -> None:
    engine = Engine()
    running = generation(engine)
    running.begin()
    engine.handles[0].made, engine.handles[0].reason = [7], "LENGTH"
    assert not running.deliver()
    assert (running.sent, running.open_sequences, len(engine.handles)) == ([], 2, 3)
    for handle in engine.handles[1:]:
        handle.made, handle.reason = [8], "LENGTH"
    assert running.deliver()
    (deltas,) = running.sent
    assert [(each.index, each.text) for each in deltas] == [(0, "7"), (1, "8"), (2, "8")]


def test_a_prompt_that_the_cache_keeps_no_block_of_is_begun_at_once() -> None:
    engine = Engine()
    generation(engine, SHORT).begin()
    assert len(engine.handles) == 3


def test_a_request_cancelled_in_its_prompt_begins_nothing_more() -> None:
    engine = Engine()
    running = generation(engine)
    running.begin()
    running.cancel()
    engine.handles[0].made = [7]
    running.deliver()
    assert [each.cancelled for each in engine.handles] == [True]


def test_sequences_that_have_begun_end_with_one_that_is_refused() -> None:
    engine = Engine(room=2)
    running = generation(engine)
    running.begin()
    engine.handles[0].made = [7]
    with pytest.raises(Mistake, match="the engine is full"):
        running.deliver()
    running.cancel()  # as the loop does
    assert [each.cancelled for each in engine.handles] == [True, True]
