"""Sampling parameters of clients, as configurations of the library."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from sluice_llm.request import GUIDE, GUIDE_TYPE, Mistake, parsed

from .engine import reason
from .tokens import Tokens

DEFAULT_TOKENS = 16
"""vLLM's default of new tokens."""
MOST_SEQUENCES = 128
MOST_STOPS = 64
MOST_STOP_LETTERS = 1024
"""Limits of stop strings, as of vLLM models."""
SEEDS = TOKENS = 1 << 63
LARGEST = 3.4028234e38
"""The library's numbers have 32 bits."""
LEAST_TEMPERATURE = 0.01
"""vLLM's, for lower ones that are not 0: divided by them, numbers of 32 bits overflow."""
SAME = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
}
"""Parameters, and the fields of `GenerationConfig` that each is."""
SAMPLED = ("top_p", "top_k", "min_p")
"""Parameters without a meaning at temperature 0, where the library does not check them."""
INTEGERS = frozenset({"n", "seed", "top_k", "max_tokens", "min_tokens", "logprobs"})
FLOATS = frozenset(
    {
        *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
        "repetition_penalty",
    }
)
FLAGS = frozenset({"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"})
OTHERS = frozenset({"stop", "stop_token_ids", "structured_outputs", GUIDE_TYPE, GUIDE})
KNOWN = INTEGERS | FLOATS | FLAGS | OTHERS
NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "bad_words": [],
    "bad": [],
    "bad_words_token_ids": [],
    "logit_bias": {},
    "prompt_logprobs": None,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "allowed_token_ids": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
    "lora_name": None,
    "beam_width": 1,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "extra_args": None,
    "stop_words": [],
    "logits_processors": None,
    "guided_decoding": None,
}
"""Parameters without an effect in this engine, and the values that ask for nothing."""
EMPTY: tuple[Any, ...] = (None, "", [], {}, [""])
NOT_EMPTY = "allowed_token_ids"
"""A parameter whose empty list asks for something: no token at all."""


@dataclass(frozen=True)
class Structure:
    """The form of an answer: a field of the library's configuration, and its value."""

    kind: str
    text: str


@dataclass(frozen=True)
class Sampling:
    """Parameters of one request, for each of its `count` sequences.

    `fields` are the library's. `logprobs` is None if none are requested. `counted`: the total of
    log probabilities is requested.
    """

    count: int = 1
    seed: int = 0
    temperature: float = 1.0
    max_tokens: int | None = None
    min_tokens: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    stops: Sequence[str] = ()
    include_stop: bool = False
    stop_tokens: frozenset[int] = frozenset()
    ignore_end: bool = False
    skip_special: bool = True
    logprobs: int | None = None
    structure: Structure | None = None
    counted: bool = False


def read_sampling(given: Mapping[str, Any], *, counted: bool) -> Sampling:
    """The parameters; Mistake names an unknown or a wrong one."""
    found = {name: _checked(name, value) for name, value in given.items() if _means(name, value)}
    temperature = found.get("temperature", 1.0)
    count, seed = found.get("n", 1), found.get("seed")
    if not 1 <= count <= MOST_SEQUENCES:
        raise Mistake(f"sampling parameter 'n' is {count}, expected 1 to {MOST_SEQUENCES}")
    if temperature < 0:
        raise Mistake(f"sampling parameter 'temperature' is {temperature}, expected at least 0")
    if temperature:
        temperature = max(temperature, LEAST_TEMPERATURE)
    else:
        _check_sampled(found)
    fields = {
        field: found[name]
        for name, field in SAME.items()
        if name in found and not (name in SAMPLED and not temperature)
    }
    if fields.get("top_k", 1) in (0, -1):  # all tokens
        del fields["top_k"]
    structure = _structure(found)
    return Sampling(
        count=count,
        seed=secrets.randbelow(SEEDS) if seed is None else seed % SEEDS,
        temperature=temperature,
        max_tokens=_max_tokens(found),
        min_tokens=found.get("min_tokens", 0),
        fields=fields,
        stops=_stops(found.get("stop")),
        include_stop=found.get("include_stop_str_in_output", False),
        stop_tokens=_stop_tokens(found.get("stop_token_ids")),
        # Text after the end of a structure would have no form.
        ignore_end=found.get("ignore_eos", False) and structure is None,
        skip_special=found.get("skip_special_tokens", True),
        logprobs=_logprobs(found.get("logprobs"), temperature),
        structure=structure,
        counted=counted,
    )


def configuration(genai: Any, sampling: Sampling, index: int, tokens: Tokens, most: int) -> Any:
    """The library's configuration for one sequence of at most `most` tokens."""
    config = genai.GenerationConfig()
    config.apply_chat_template = False
    config.set_eos_token_id(tokens.end)
    config.max_new_tokens = most
    config.ignore_eos = sampling.ignore_end
    config.do_sample = sampling.temperature > 0
    config.rng_seed = (sampling.seed + index) % SEEDS
    config.logprobs = 1 if sampling.counted or sampling.logprobs is not None else 0
    try:
        _set(config, "stop_token_ids", {*tokens.ends, *sampling.stop_tokens})
        if sampling.temperature > 0:
            _set(config, "temperature", sampling.temperature)
        for name, value in sampling.fields.items():
            _set(config, name, value)
        if sampling.structure is not None:
            config.structured_output_config = structured(genai, sampling.structure)
        config.validate()
    except RuntimeError as error:
        raise Mistake(reason(error)) from error
    return config


def _set(config: Any, field: str, value: Any) -> None:
    try:
        setattr(config, field, value)
    except (TypeError, OverflowError) as error:
        name = next((name for name, each in SAME.items() if each == field), field)
        raise Mistake(
            f"sampling parameter '{name}' is {str(value)[:40]}, which is out of range"
        ) from error


def structured(genai: Any, structure: Structure) -> Any:
    """The library's configuration of a structure."""
    found = genai.StructuredOutputConfig()
    setattr(found, structure.kind, structure.text)
    return found


def _means(name: str, value: Any) -> bool:
    """Whether a parameter asks for anything; Mistake if this engine lacks or does not know it."""
    if name in KNOWN:
        return value is not None
    if name not in NEUTRAL:
        near = " or ".join(map(repr, get_close_matches(name, KNOWN, n=3)))
        known = f"did you mean {near}?" if near else f"expected one of {', '.join(sorted(KNOWN))}"
        raise Mistake(f"unknown sampling parameter '{name}', {known}")
    empty = value in EMPTY and not (name == NOT_EMPTY and value == [])
    if empty or str(value) == str(NEUTRAL[name]):
        return False
    raise Mistake(
        f"sampling parameter '{name}' is not supported by OpenVINO GenAI models; leave it out, or "
        "serve the model with vLLM",
        "UNSUPPORTED",
    )


def _checked(name: str, value: Any) -> Any:
    """The value, which may be a text of a number, as Triton's clients send them."""
    if isinstance(value, str):
        value = _of_text(name, value)
    kinds: tuple[type, ...] = ()
    if name in INTEGERS:
        kinds, expected = (int,), "a whole number"
    elif name in FLOATS:
        kinds, expected = (int, float), "a number"
    elif name in FLAGS:
        kinds, expected = (bool,), "true or false"
    if kinds and (type(value) not in kinds):
        raise Mistake(f"sampling parameter '{name}' is {value!r}, expected {expected}")
    if name in FLOATS and not abs(value) <= LARGEST:  # nor is NaN
        raise Mistake(
            f"sampling parameter '{name}' is {str(value)[:40]}, expected a finite number of 32 bits"
        )
    return value


def _of_text(name: str, text: str) -> Any:
    try:
        if name in INTEGERS:
            return int(text)
        if name in FLOATS:
            return float(text)
    except ValueError:
        raise Mistake(f"sampling parameter '{name}' is {text!r}, expected a number") from None
    return {"true": True, "false": False}.get(text.lower(), text) if name in FLAGS else text


def _max_tokens(found: Mapping[str, Any]) -> int | None:
    most, least = found.get("max_tokens"), found.get("min_tokens", 0)
    if most is not None and most < 1:
        raise Mistake(f"sampling parameter 'max_tokens' is {most}, expected at least 1")
    if least < 0 or (most is not None and least > most):
        raise Mistake(
            f"sampling parameter 'min_tokens' is {least}, expected 0 to max_tokens ({most})"
        )
    return most


def _check_sampled(found: Mapping[str, Any]) -> None:
    """Refuse values that the library refuses at other temperatures."""
    if not 0 < found.get("top_p", 1) <= 1:
        raise Mistake(
            f"sampling parameter 'top_p' is {found['top_p']}, expected above 0 and at most 1"
        )
    if not 0 <= found.get("min_p", 0) <= 1:
        raise Mistake(f"sampling parameter 'min_p' is {found['min_p']}, expected 0 to 1")
    if found.get("top_k", 0) < -1:
        raise Mistake(f"sampling parameter 'top_k' is {found['top_k']}, expected at least -1")


def _stops(given: Any) -> tuple[str, ...]:
    words = ([given] if given else []) if isinstance(given, str) else given or []
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
        raise Mistake(
            f"sampling parameter 'stop' is {str(given)[:40]!r}, expected a text or a list of texts"
        )
    if len(words) > MOST_STOPS:
        raise Mistake(
            f"sampling parameter 'stop' has {len(words)} texts, expected at most {MOST_STOPS}"
        )
    if (longest := max(map(len, words), default=0)) > MOST_STOP_LETTERS:
        raise Mistake(
            f"sampling parameter 'stop' has a text of {longest} characters, expected at most "
            f"{MOST_STOP_LETTERS}"
        )
    if "" in words:
        raise Mistake("sampling parameter 'stop' has an empty text; leave it out")
    return tuple(words)


def _stop_tokens(given: Any) -> frozenset[int]:
    if isinstance(given, str):
        given = parsed("sampling parameter 'stop_token_ids' is", given)
    tokens = given or []
    if not isinstance(tokens, list) or not all(
        type(each) is int and 0 <= each < TOKENS for each in tokens
    ):
        raise Mistake(
            f"sampling parameter 'stop_token_ids' is {str(given)[:40]}, expected a list of tokens"
        )
    return frozenset(tokens)


def _logprobs(wanted: int | None, temperature: float) -> int | None:
    if wanted is None or wanted == 0:
        return wanted
    if wanted == 1 and not temperature:
        return 1
    raise Mistake(
        f"sampling parameter 'logprobs' is {wanted}, but OpenVINO GenAI computes log probabilities "
        "of the chosen token only: expected 0, or 1 at temperature 0",
        "UNSUPPORTED",
    )


def _structure(found: Mapping[str, Any]) -> Structure | None:
    given, kind = found.get("structured_outputs"), found.get(GUIDE_TYPE)
    if given is None and kind is None:
        return None
    if given is None:
        guides = {"json": "json_object", "json_schema": "json", "ebnf_grammar": "grammar"}
        given = {guides.get(str(kind), kind): found.get(GUIDE) if kind != "json" else True}
    if isinstance(given, str):
        given = parsed("sampling parameter 'structured_outputs' is", given)
    if not isinstance(given, dict):
        raise Mistake(f"sampling parameter 'structured_outputs' is {given!r}, expected an object")
    wanted = {name: value for name, value in given.items() if value is not None}
    if len(wanted) != 1:
        raise Mistake(
            f"sampling parameter 'structured_outputs' has {sorted(wanted)}, expected one of json, "
            "json_object, regex, choice, grammar"
        )
    ((form, value),) = wanted.items()
    structure = _one_structure(form, value)
    if structure is not None and found.get("min_tokens"):
        raise Mistake(
            f"sampling parameter 'min_tokens' is {found['min_tokens']}, expected 0 with a "
            "structured output: the structure ends the text"
        )
    if structure is not None and not _is_unicode(structure.text):
        raise Mistake(f"'{form}' of 'structured_outputs' has half a character (a lone surrogate)")
    return structure


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _one_structure(kind: str, value: Any) -> Structure | None:
    if kind == "json" and isinstance(value, dict | str):
        return Structure("json_schema", value if isinstance(value, str) else json.dumps(value))
    if kind == "json_object" and isinstance(value, bool):
        return Structure("json_schema", '{"type": "object"}') if value else None
    if kind in ("regex", "grammar") and isinstance(value, str):
        return Structure(kind, value)
    if kind == "choice" and isinstance(value, list) and value:
        if all(isinstance(each, str) and each for each in value):
            texts = [json.dumps(each, ensure_ascii=False) for each in value]
            return Structure("grammar", f"root ::= {' | '.join(texts)}")
        raise Mistake("'choice' of 'structured_outputs' must be a list of texts")
    if kind in ("json", "json_object", "regex", "choice", "grammar"):
        raise Mistake(f"'{kind}' of 'structured_outputs' is {str(value)[:40]!r}, of a wrong type")
    raise Mistake(
        f"'{kind}' of 'structured_outputs' is not supported by OpenVINO GenAI models, expected one "
        "of json, json_object, regex, choice, grammar",
        "UNSUPPORTED",
    )
