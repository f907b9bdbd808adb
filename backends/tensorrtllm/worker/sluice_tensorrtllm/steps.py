"""What has each sequence gained, though the library tells all it has so far, in one object?"""

from dataclasses import dataclass
from typing import Any

from .logprobs import Chance, chances


@dataclass(frozen=True)
class Gain:
    """What one sequence has gained since the last time, and what holds for all of it."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    cumulative_logprob: float | None = None
    logprobs: tuple[Chance, ...] = ()
    metrics: Any = None


class Progress:
    """How far the sequences of one request have been told.

    An output is read whole before anybody waits: the library goes on writing to the same object.
    `max_tokens` is what ends a sequence of which the library does not say why it has ended: of
    several it says so only for the last.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._told: dict[int, tuple[int, int]] = {}

    def read(self, output: Any) -> list[Gain]:
        """The gains of all sequences, in the order of their indices."""
        sequences = sorted(output.outputs, key=lambda each: each.index)
        return [self._gain(each, self._reason(each, output.finished)) for each in sequences]

    def _reason(self, sequence: Any, finished: bool) -> str | None:
        told: str | None = sequence.finish_reason
        if told or not finished:
            return told
        return "length" if len(sequence.token_ids) >= self._max_tokens else "stop"

    def _gain(self, sequence: Any, reason: str | None) -> Gain:
        letters, tokens = self._told.get(sequence.index, (0, 0))
        text, count = sequence.text, len(sequence.token_ids)
        if not reason and text.endswith("\ufffd"):
            text = text.rstrip("\ufffd")  # the rest of the character is still to come
        # A stop word that is found takes back what was told of it.
        self._told[sequence.index] = max(letters, len(text)), max(tokens, count)
        return Gain(
            index=sequence.index,
            text=text[letters:],
            tokens=max(0, count - tokens),
            finish_reason=reason,
            stop_reason=sequence.stop_reason,
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=chances(sequence, tokens),
            metrics=sequence.request_perf_metrics,
        )
