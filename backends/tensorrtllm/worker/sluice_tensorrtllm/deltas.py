"""Deltas of sequences, with the log probabilities of their tokens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Decode = Callable[[int], str]
"""The text of one token; an incomplete character is U+FFFD."""
UNLIKELY = -9999.0
"""OpenAI's value for a token whose log probability is not known."""


@dataclass(frozen=True)
class RankedToken:
    """A token, its log probability, and its rank by that, from 1; 0 if unknown."""

    token: int
    logprob: float
    rank: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probabilities at one new token: of the token itself, and of the likeliest ones."""

    chosen: RankedToken
    likeliest: tuple[RankedToken, ...]


def token_logprobs(sequence: Any, start: int) -> tuple[TokenLogprobs, ...]:
    """Those of the tokens from number `start` on; none if the library has none."""
    tokens, entries = sequence.token_ids[start:], (sequence.logprobs or [])[start:]
    return tuple(_chance(token, each) for token, each in zip(tokens, entries, strict=False))


def chat_logprobs(found: Sequence[TokenLogprobs], top: int, decode: Decode) -> dict[str, Any]:
    """The `logprobs` of a choice of `chat/completions`, with the `top` likeliest tokens."""
    return {
        "content": [
            {
                **_said(each.chosen, decode),
                "top_logprobs": [_said(other, decode) for other in each.likeliest[:top]],
            }
            for each in found
        ]
    }


def completion_logprobs(
    found: Sequence[TokenLogprobs], top: int, decode: Decode, offset: int
) -> dict[str, Any]:
    """The `logprobs` of a choice of `completions`; the first token's text begins at `offset`."""
    texts = [decode(each.chosen.token) for each in found]
    offsets = [offset + sum(map(len, texts[:number])) for number in range(len(texts))]
    likeliest = [_with_chosen(each, top) for each in found]
    return {
        "tokens": texts,
        "token_logprobs": [each.chosen.logprob for each in found],
        "text_offset": offsets,
        "top_logprobs": [{decode(one.token): one.logprob for one in each} for each in likeliest],
    }


def contract_logprobs(found: Sequence[TokenLogprobs], decode: Decode) -> str:
    """The output `logprobs` of the text contract: for each token those known, by their ids."""
    return json.dumps([_by_id(each, decode) for each in found], ensure_ascii=False)


def _chance(token: int, entry: Any) -> TokenLogprobs:
    """An entry maps tokens; in some versions of the library it is a number alone."""
    if not isinstance(entry, dict):
        only = RankedToken(token, _finite(float(entry)))
        return TokenLogprobs(only, (only,))
    known = (RankedToken(t, _finite(each.logprob), each.rank or 0) for t, each in entry.items())
    likeliest = tuple(sorted(known, key=lambda each: -each.logprob))
    chosen = next((each for each in likeliest if each.token == token), RankedToken(token, UNLIKELY))
    return TokenLogprobs(chosen, likeliest)


def _finite(logprob: float) -> float:
    """Bounded below: JSON has neither infinities nor NaN."""
    return logprob if logprob > UNLIKELY else UNLIKELY


def _with_chosen(chance: TokenLogprobs, top: int) -> tuple[RankedToken, ...]:
    """The likeliest tokens, and the chosen one if it is not among them."""
    likeliest = chance.likeliest[:top]
    return likeliest if chance.chosen in likeliest else (*likeliest, chance.chosen)


def _said(ranked: RankedToken, decode: Decode) -> dict[str, Any]:
    text = decode(ranked.token)
    return {"token": text, "logprob": ranked.logprob, "bytes": list(text.encode())}


def _by_id(chance: TokenLogprobs, decode: Decode) -> dict[str, Any]:
    """The chosen token first."""
    ranked = dict.fromkeys((chance.chosen, *chance.likeliest))
    return {
        str(each.token): {
            "logprob": each.logprob,
            "rank": each.rank,
            "decoded_token": decode(each.token),
        }
        for each in ranked
    }


@dataclass(frozen=True)
class SequenceDelta:
    """New text and tokens of one sequence, and values that hold for all of it."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    metrics: Any = None


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
