"""What is too much for one request of OpenAI's? vLLM leaves some of it to fate."""

from collections.abc import Mapping
from typing import Any

import orjson
from vllm.exceptions import VLLMValidationError

from backends.vllm.grammars import check_schema
from backends.vllm.sampling import (
    MAX_ELEMENTS,
    MAX_OBJECT_BYTES,
    MAX_SEQUENCES,
    MAX_STRING_LENGTH,
    MAX_STRINGS,
)
from gateway.openai_contract import Endpoint

MAX_GRAMMAR_BYTES = 1 << 16
"""The engine compiles a grammar in a time that may grow with its square: here about 15 s for a
schema of this size with nothing but properties, though a short pattern can take longer."""

MAX_PROMPTS = 2048
"""As many as OpenAI takes in one request for embeddings."""

MAX_TOKENIZED_BYTES = 1 << 20
"""All texts of all requests are tokenized one after the other, this much in about a second."""

TOKENIZERS = frozenset({Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
"""Endpoints for which no context of a model is a limit."""

CONSTRAINTS = ("response_format", "structured_outputs", "tools", "text")
"""Members of a body that may become a grammar."""

GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
"""What a constraint of vLLM's holds, one of them."""


def check_body(body: Mapping[str, Any]) -> None:
    """Refuse what takes longer to read than others can wait."""
    for name in CONSTRAINTS:
        if body.get(name) and len(orjson.dumps(body[name])) > MAX_OBJECT_BYTES:
            _refuse(name, f"{name} is larger than the {MAX_OBJECT_BYTES} bytes of JSON allowed")
    # With tools beside them vLLM reads these before it asks the engine for anything.
    for name in ("response_format", "text"):
        check_schema(body.get(name))
    constraint = body.get("structured_outputs")
    if isinstance(constraint, dict):
        check_schema([constraint.get("json"), constraint.get("structural_tag")])


def check_size(endpoint: Endpoint, size: int) -> None:
    """Refuse a body of so many bytes if others would have to wait for it too long."""
    if endpoint in TOKENIZERS and size > MAX_TOKENIZED_BYTES:
        _refuse("", f"{endpoint} takes at most {MAX_TOKENIZED_BYTES} bytes of JSON, got {size}")


def check_count(prompts: int) -> None:
    """Refuse more prompts than one request may hold."""
    if prompts > MAX_PROMPTS:
        _refuse("prompt", f"more than the {MAX_PROMPTS} prompts that one request may have")


def check_parameters(parameters: Any) -> None:
    """Refuse sampling parameters that would keep the gateway busy; vLLM checks the rest."""
    _check("n", parameters.n, MAX_SEQUENCES)
    for name in ("stop", "bad_words"):
        strings = getattr(parameters, name) or ()
        _check(f"the number of strings in {name}", len(strings), MAX_STRINGS, name)
        longest = max(map(len, strings), default=0)
        _check(f"the length of a string in {name}", longest, MAX_STRING_LENGTH, name)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        elements = len(getattr(parameters, name) or ())
        _check(f"the number of elements in {name}", elements, MAX_ELEMENTS, name)
    if parameters.structured_outputs is not None:
        _check_grammar(parameters.structured_outputs)


def _check_grammar(constraint: Any) -> None:
    """Whichever part of the request it comes from: a schema, an expression, or the tools."""
    given = (getattr(constraint, name) for name in GRAMMARS)
    size = sum(len(orjson.dumps(each)) for each in given if each is not None)
    _check("the size of the grammar in bytes", size, MAX_GRAMMAR_BYTES, "structured_outputs")


def _check(what: str, value: int, limit: int, parameter: str = "n") -> None:
    if value > limit:
        _refuse(parameter, f"{what} is {value}, expected at most {limit}")


def _refuse(parameter: str, message: str) -> None:
    raise VLLMValidationError(message, parameter=parameter or None)
