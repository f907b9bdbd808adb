"""Schemas that are refused because they would block all other requests."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def imported(store: object) -> None:
    """vLLM, imported as the gateway does it."""


def refusal(schema: Any) -> str:
    """The reason why a schema is refused, "" if it is not."""
    from vllm.exceptions import VLLMValidationError

    from backends.vllm.grammar_time import check_schema

    try:
        check_schema(schema)
    except VLLMValidationError as error:
        return str(error)
    return ""


def texts(**constraints: list[Any]) -> dict[str, Any]:
    """An object with a text for each value of a constraint."""
    given = [(name, value) for name, values in constraints.items() for value in values]
    properties = {f"p{n}": {"type": "string", name: value} for n, (name, value) in enumerate(given)}
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "served"),
    [
        (texts(pattern=["^[a-z]{1,1023}$"]), True),
        (texts(pattern=["^[a-z]{1,1024}$"]), False),
        (texts(pattern=["^[a-z]{9000}$"]), False),
        (texts(pattern=["^[a-z]{9000,}$"]), False),
        (texts(pattern=["^[a-z]{,9000}$"]), False),
        (texts(pattern=["^[a-z]{1," + "9" * 5000 + "}$"]), False),
        (texts(pattern=["^[a-z]{1,255}$"] * 16), True),
        (texts(pattern=["^[a-z]{1,255}$"] * 17), False),
        ({"type": "object", "maxProperties": 1024}, True),
        ({"type": "object", "maxProperties": 1025}, False),
        (texts(maxLength=list(range(100, 132))), True),
        (texts(maxLength=list(range(100, 133))), False),
        (texts(minLength=[10] * 500, maxLength=[255] * 500), True),
        ({"description": "{}, {x}, {1}, {,}, maxLength: 5"}, True),
        ("no JSON", True),
        (None, True),
    ],
)
def test_a_schema_is_served_up_to_its_limits(schema: Any, served: bool) -> None:
    assert (refusal(schema) == "") is served
    if isinstance(schema, dict):
        assert (refusal(json.dumps(schema)) == "") is served
        assert (refusal({"format": {"schema": schema}}) == "") is served


def test_other_ways_to_write_the_same_json_are_seen_through() -> None:
    assert "different lengths" in refusal(
        json.dumps(texts(maxLength=list(range(40)))).replace("maxLength", "max\\u004cength")
    )


def test_what_is_served_is_read_in_a_moment() -> None:
    """The limit is about this: the event loop is held up by what vLLM reads there."""
    from xgrammar import Grammar

    schema = texts(pattern=["^[a-z]{1,255}$"] * 16)
    assert refusal(schema) == ""
    began = time.monotonic()
    Grammar.from_json_schema(json.dumps(schema))
    assert time.monotonic() - began < 2


def test_expressions_and_grammars_have_limits_of_vllms_own() -> None:
    from backends.vllm.grammar_time import check_constraint

    check_constraint(SimpleNamespace(json=None, regex="a{1,100000}", structural_tag=None))
    check_constraint(None)
