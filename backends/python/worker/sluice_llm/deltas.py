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


def finite(logprob: float) -> float:
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
