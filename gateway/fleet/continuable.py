"""Parameters of requests whose texts can be continued."""

from collections.abc import Collection, Mapping
from typing import Any

import orjson

SAMPLING = frozenset(
    {
        *("allowed_token_ids", "ignore_eos", "include_stop_str_in_output", "logit_bias"),
        *("max_tokens", "min_p", "min_tokens", "repetition_penalty", "stop", "stop_token_ids"),
        *("temperature", "top_k", "top_p"),
    }
)
"""Sampling parameters with the same effect on the rest of a text as on the whole one.

Not so a seed, and penalties that count the tokens of an answer: each begins anew in every engine.
"""
NEUTRAL: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "bad_words": [""],
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "include_reasoning": True,
    "length_penalty": 1,
    "logprobs": False,
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_words": [""],
    "tool_choice": "none",
    "top_logprobs": 0,
    "use_beam_search": False,
}
"""Values of other parameters that have no effect; None has none of any."""
EMPTY = frozenset({"bad_words", "documents", "stop_words", "tools"})
"""Parameters of which an empty list or text has no effect."""
LIMITS = ("max_tokens", "max_completion_tokens")
LEAST = "min_tokens"
STOP = "stop"


class NotContinued(Exception):
    """The reason why a text is not continued."""


def check(parameters: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise NotContinued for a parameter with an effect that is not known to be continued."""
    for name, value in parameters.items():
        if name not in allowed and not _is_neutral(name, value):
            raise NotContinued(f"the request has '{name}'")
    less(dict(parameters), 0)
    stops(parameters)


def _is_neutral(name: str, value: Any) -> bool:
    if value is None or (name in EMPTY and value in ("", [])):
        return True
    neutral = NEUTRAL.get(name)
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def less(parameters: dict[str, Any], tokens: int) -> None:
    """Take the tokens of a text so far from the limits; NotContinued if nothing is left."""
    for name in LIMITS:
        if parameters.get(name) is not None:
            parameters[name] = _number(parameters, name) - tokens
            if parameters[name] <= 0:
                raise NotContinued(f"its '{name}' are used up")
    if parameters.get(LEAST) is not None:
        parameters[LEAST] = max(0, _number(parameters, LEAST) - tokens)


def _number(parameters: Mapping[str, Any], name: str) -> int:
    try:
        return int(parameters[name])
    except (TypeError, ValueError):
        raise NotContinued(f"'{name}' of the request is no number") from None


def stops(parameters: Mapping[str, Any]) -> list[str]:
    """The stop strings."""
    given = parameters.get(STOP) or []
    if isinstance(given, str):
        try:
            given = orjson.loads(given) if given.startswith("[") else [given]
        except orjson.JSONDecodeError:
            given = None
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise NotContinued(f"'{STOP}' of the request is no list of texts")
    return given


def check_stops(text: str, strings: Collection[str]) -> None:
    """Raise NotContinued for a text that ends within a stop string."""
    for each in strings:
        if any(text.endswith(each[:size]) for size in range(1, len(each))):
            raise NotContinued("its text ends with the beginning of a stop string")
