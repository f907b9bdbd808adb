"""From what a client says about sampling to values with the types of SamplingParams."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.vllm.sampling import (
    INT64,
    MAX_ELEMENTS,
    MAX_OBJECT_BYTES,
    MAX_SEQUENCES,
    MAX_STRING_LENGTH,
    MAX_STRINGS,
    SamplingRules,
    casts_of,
)
from gateway.errors import Code, InferenceError

CONTEXT = 100


@dataclass
class Constraint:
    """Stands for StructuredOutputsParams."""

    regex: str | None = None
    choice: list[str] | None = None
    chosen: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if self.regex == "[":
            raise ValueError("unclosed bracket")


RULES = SamplingRules(
    casts_of(
        {
            "n": int,
            "temperature": float,
            "ignore_eos": bool,
            "seed": int | None,
            "max_tokens": int | None,
            "stop": str | list[str] | None,
            "stop_token_ids": list[int] | None,
            "bad_words": list[str] | None,
            "logit_bias": dict[int, float] | None,
            "extra_args": dict[str, Any] | None,
            "structured_outputs": Constraint | None,
            "output_kind": int,
            "_eos_token_id": int | None,
        }
    ),
    CONTEXT,
)


def read(**given: Any) -> dict[str, Any]:
    return RULES.read(given)


def refusal(**given: Any) -> str:
    with pytest.raises(InferenceError) as caught:
        RULES.read(given)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("n", 2, 2),
        ("n", "2", 2),
        ("n", " 2 ", 2),
        ("n", 2.0, 2),
        ("n", "2.0", 2),
        ("n", True, 1),
        ("max_tokens", None, None),
        ("seed", INT64[0], INT64[0]),
        ("seed", str(INT64[-1]), INT64[-1]),
        ("temperature", "0", 0.0),
        ("temperature", 1, 1.0),
        ("temperature", "7e-1", 0.7),
        ("ignore_eos", "false", False),
        ("ignore_eos", "True", True),
        ("ignore_eos", "0", False),
        ("ignore_eos", 1, True),
        ("stop", "a", "a"),
        ("stop", "[a]", "[a]"),
        ("stop", ["a", "b"], ["a", "b"]),
        ("stop_token_ids", [1, "2"], [1, 2]),
        ("stop_token_ids", "[1, 2]", [1, 2]),
        ("bad_words", "a", ["a"]),
        ("bad_words", '["a"]', ["a"]),
        ("logit_bias", {"5": "1.5"}, {5: 1.5}),
        ("logit_bias", '{"5": 1}', {5: 1.0}),
        ("extra_args", {"a": [1]}, {"a": [1]}),
        ("structured_outputs", '{"choice": ["a"]}', Constraint(choice=["a"])),
        ("structured_outputs", {"regex": "a"}, Constraint(regex="a")),
    ],
)
def test_a_value_gets_the_type_of_its_field(name: str, given: Any, expected: Any) -> None:
    found = read(**{name: given})[name]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("n", "two", "an integer"),
        ("n", 1.5, "an integer"),
        ("n", None, "an integer"),
        ("n", [1], "an integer"),
        ("seed", INT64[-1] + 1, "an integer of 64 bits"),
        ("seed", INT64[0] - 1, "an integer of 64 bits"),
        ("temperature", "hot", "a number"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", "inf", "a finite number"),
        ("ignore_eos", "maybe", "true or false"),
        ("ignore_eos", 2, "true or false"),
        ("stop", 5, "a string or a list"),
        ("stop", [5], "each element to be a string"),
        ("stop_token_ids", "[1", "valid JSON"),
        ("stop_token_ids", 1, "a list"),
        ("logit_bias", [1], "an object"),
        ("logit_bias", {"x": 1}, "an integer"),
        ("logit_bias", {"1": float("inf")}, "a finite number"),
        ("structured_outputs", {"regex": "["}, "unclosed bracket"),
        ("structured_outputs", {"rejex": "a"}, "no other keys than choice, regex"),
        ("structured_outputs", {"chosen": "a"}, "no other keys than choice, regex"),
        ("structured_outputs", {"regex": "a" * MAX_OBJECT_BYTES}, "bytes of JSON"),
        ("extra_args", {"a": "a" * MAX_OBJECT_BYTES}, "bytes of JSON"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, given: Any, expected: str) -> None:
    said = refusal(**{name: given})
    assert said.startswith(f"sampling parameter '{name}' is ")
    assert expected in said
    assert len(said) < 300


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("extra_args", {"a": nested(400)}),
        ("temperature", nested(400)),
        ("temperature", "1" + 400 * "0"),
        ("logit_bias", {"1": "1" + 400 * "0"}),
    ],
)
def test_what_is_nested_too_deep_or_too_large_is_refused_by_name(name: str, given: Any) -> None:
    assert f"sampling parameter '{name}'" in refusal(**{name: given})


def test_an_unknown_name_is_refused_with_names_like_it() -> None:
    assert refusal(max_token=5) == (
        "'max_token' is neither an input of the model nor a sampling parameter; did you mean "
        "'max_tokens'?"
    )
    assert refusal(xyzzy=5).endswith("nor a sampling parameter")


@pytest.mark.parametrize("name", ["output_kind", "_eos_token_id"])
def test_the_engines_own_fields_cannot_be_set(name: str) -> None:
    assert f"'{name}' is neither" in refusal(**{name: 1})


@pytest.mark.parametrize("empty", [[""], [], ""])
def test_the_empty_word_lists_of_litellm_say_nothing(empty: Any) -> None:
    assert read(bad_words=empty, stop_words=empty, n=1) == {"n": 1}


def test_stop_words_are_stop_strings() -> None:
    assert read(stop_words=["a"]) == {"stop": ["a"]}


@pytest.mark.parametrize(
    ("at", "beyond", "said"),
    [
        ({"n": MAX_SEQUENCES}, {"n": MAX_SEQUENCES + 1}, "n=65 is more than the 64"),
        ({"max_tokens": CONTEXT}, {"max_tokens": CONTEXT + 1}, "context of 100 tokens"),
        ({"stop": ["a"] * MAX_STRINGS}, {"stop": ["a"] * (MAX_STRINGS + 1)}, "strings in 'stop'"),
        (
            {"bad_words": "a" * MAX_STRING_LENGTH},
            {"bad_words": "a" * (MAX_STRING_LENGTH + 1)},
            "a string in 'bad_words'",
        ),
        (
            {"stop_token_ids": [1] * MAX_ELEMENTS},
            {"stop_token_ids": [1] * (MAX_ELEMENTS + 1)},
            f"at most {MAX_ELEMENTS} elements",
        ),
        (
            {"logit_bias": {str(token): 1.0 for token in range(MAX_ELEMENTS)}},
            {"logit_bias": {str(token): 1.0 for token in range(MAX_ELEMENTS + 1)}},
            f"at most {MAX_ELEMENTS} elements",
        ),
    ],
)
def test_a_limit_can_be_reached_and_not_exceeded(
    at: dict[str, Any], beyond: dict[str, Any], said: str
) -> None:
    assert read(**at)
    assert said in refusal(**beyond)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_what_vllm_reads_of_a_transfer_is_an_object(name: str) -> None:
    assert read(extra_args={name: {"do_remote_prefill": True}})
    assert refusal(extra_args={name: "yes"}) == f"'{name}' in 'extra_args' must be an object"
