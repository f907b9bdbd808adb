"""Deltas of sequences, read from the library's outputs."""

from typing import Any

from sluice_llm.deltas import (
    UNLIKELY,
    RankedToken,
    SequenceDelta,
    TokenLogprobs,
    finite,
)


def token_logprobs(sequence: Any, start: int) -> tuple[TokenLogprobs, ...]:
    """Those of the tokens from number `start` on; none if the library has none."""
    tokens, entries = sequence.token_ids[start:], (sequence.logprobs or [])[start:]
    return tuple(_chance(token, each) for token, each in zip(tokens, entries, strict=False))


def _chance(token: int, entry: Any) -> TokenLogprobs:
    """An entry maps tokens; in some versions of the library it is a number alone."""
    if not isinstance(entry, dict):
        only = RankedToken(token, finite(float(entry)))
        return TokenLogprobs(only, (only,))
    known = (RankedToken(t, finite(each.logprob), each.rank or 0) for t, each in entry.items())
    likeliest = tuple(sorted(known, key=lambda each: -each.logprob))
    chosen = next((each for each in likeliest if each.token == token), RankedToken(token, UNLIKELY))
    return TokenLogprobs(chosen, likeliest)


class DeltaReader:
    """Reads the deltas of one request from outputs that hold whole sequences.

    An output is read completely before the next await: the library continues to write to it. The
    library gives a finish reason only for the last of several sequences; `max_tokens` decides
    that of the others.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._sent: dict[int, tuple[int, int]] = {}

    def read(self, output: Any) -> list[SequenceDelta]:
        """The deltas of all sequences, in the order of their indices."""
        sequences = sorted(output.outputs, key=lambda each: each.index)
        return [self._gain(each, self._reason(each, output.finished)) for each in sequences]

    def _reason(self, sequence: Any, finished: bool) -> str | None:
        reason: str | None = sequence.finish_reason
        if reason or not finished:
            return reason
        return "length" if len(sequence.token_ids) >= self._max_tokens else "stop"

    def _gain(self, sequence: Any, reason: str | None) -> SequenceDelta:
        letters, tokens = self._sent.get(sequence.index, (0, 0))
        text, count = sequence.text, len(sequence.token_ids)
        if not reason and text.endswith("\ufffd"):
            text = text.rstrip("\ufffd")  # the rest of the character is still to come
        # A found stop word removes text that has been sent already.
        self._sent[sequence.index] = max(letters, len(text)), max(tokens, count)
        return SequenceDelta(
            index=sequence.index,
            text=text[letters:],
            tokens=max(0, count - tokens),
            finish_reason=reason,
            stop_reason=sequence.stop_reason,
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=token_logprobs(sequence, tokens),
            metrics=sequence.request_perf_metrics,
        )
