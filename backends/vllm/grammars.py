"""Which schemas would keep everybody waiting while vLLM makes a grammar of them?"""

import re
from typing import Any

import orjson
from vllm.exceptions import VLLMValidationError

MAX_REPETITIONS = 1 << 20
"""The sum of the squares of all repetitions in a schema's patterns, and of the properties that it
counts. So long does vLLM take to read them, on the event loop: here up to 0.3 s."""

MAX_LENGTHS = 32
"""Different lengths that a schema gives to texts. For each of them the engine computes for a
second or more, beside a few other schemas (`grammar_time.py`)."""

QUANTIFIER = re.compile(r"\{(\d+)?(?:,(\d+)?)?\}")
PROPERTIES = re.compile(r'"(?:min|max)Properties"\s*:\s*(\d+)')
LENGTH = re.compile(r'"(?:min|max)Length"\s*:\s*(\d+)')
MOST_DIGITS = 6
"""Of a number that matters; a longer one is too much anyway."""


def check_schema(schema: Any) -> None:
    """Refuse a schema, or what has schemas in it; a text is read as JSON if it is some."""
    written = orjson.dumps(_read(schema)).decode()
    repeated = [_number(each) for pair in QUANTIFIER.findall(written) for each in pair]
    counted = [_number(each) for each in PROPERTIES.findall(written)]
    cost = sum(number**2 for number in (*repeated, *counted))
    if cost > MAX_REPETITIONS:
        _refuse(
            "the squares of the repetitions in its patterns, and of its numbers of properties, "
            f"make {cost} in all, expected at most {MAX_REPETITIONS}"
        )
    lengths = len(set(LENGTH.findall(written)))
    if lengths > MAX_LENGTHS:
        _refuse(f"it gives texts {lengths} different lengths, expected at most {MAX_LENGTHS}")


def check_constraint(constraint: Any) -> None:
    """The same for the schemas in vLLM's `StructuredOutputsParams`, None for none."""
    for name in ("json", "structural_tag"):
        if (schema := getattr(constraint, name, None)) is not None:
            check_schema(schema)


def _read(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return orjson.loads(schema)
    except orjson.JSONDecodeError:
        return schema  # vLLM says what is wrong with it


def _number(digits: str) -> int:
    return int(digits[: MOST_DIGITS + 1] or 0)


def _refuse(reason: str) -> None:
    raise VLLMValidationError(f"the schema takes too long to prepare: {reason}")
