"""Deltas of sequences, with the log probabilities of their tokens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Decode = Callable[[int], str]
"""The text of one token; what is part of a character is U+FFFD."""
UNLIKELY = -9999.0
"""OpenAI's value for a token that is not among those whose log probabilities are known."""


@dataclass(frozen=True)
class Ranked:
    """A token, its log probability, and its rank by that, from 1; 0 where nobody says."""

    token: int
    logprob: float
    rank: int = 0


@dataclass(frozen=True)
class Chance:
    """What is known of the place of one new token: of the token itself, and of the likeliest."""

    chosen: Ranked
    likeliest: tuple[Ranked, ...]


def chances(sequence: Any, told: int) -> tuple[Chance, ...]:
    """Those of the tokens from number `told` on; none where the library has none."""
    tokens, entries = sequence.token_ids[told:], (sequence.logprobs or [])[told:]
    return tuple(_chance(token, each) for token, each in zip(tokens, entries, strict=False))


def chat_logprobs(found: Sequence[Chance], top: int, decode: Decode) -> dict[str, Any]:
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
    found: Sequence[Chance], top: int, decode: Decode, offset: int
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


def contract_logprobs(found: Sequence[Chance], decode: Decode) -> str:
    """The output `logprobs` of the text contract: for each token those known, by their ids."""
    return json.dumps([_by_id(each, decode) for each in found], ensure_ascii=False)


def _chance(token: int, entry: Any) -> Chance:
    """An entry has the tokens that are known; some versions of the library have a number alone."""
    if not isinstance(entry, dict):
        only = Ranked(token, _finite(float(entry)))
        return Chance(only, (only,))
    known = (Ranked(t, _finite(each.logprob), each.rank or 0) for t, each in entry.items())
    likeliest = tuple(sorted(known, key=lambda each: -each.logprob))
    chosen = next((each for each in likeliest if each.token == token), Ranked(token, UNLIKELY))
    return Chance(chosen, likeliest)


def _finite(logprob: float) -> float:
    """JSON has neither infinities nor what is no number."""
    return logprob if logprob > UNLIKELY else UNLIKELY


def _with_chosen(chance: Chance, top: int) -> tuple[Ranked, ...]:
    """The likeliest, and the chosen token where it is not among them."""
    likeliest = chance.likeliest[:top]
    return likeliest if chance.chosen in likeliest else (*likeliest, chance.chosen)


def _said(ranked: Ranked, decode: Decode) -> dict[str, Any]:
    text = decode(ranked.token)
    return {"token": text, "logprob": ranked.logprob, "bytes": list(text.encode())}


def _by_id(chance: Chance, decode: Decode) -> dict[str, Any]:
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
