"""Sampling parameters, read and refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
from sluice_llm.request import Mistake

from backends.openvino_genai.worker.sluice_openvino_genai.pattern_size import States, depth, size
from backends.openvino_genai.worker.sluice_openvino_genai.sampling import (
    Structure,
    configuration,
    read_sampling,
)

TOKENS: Any = SimpleNamespace(end=2, ends=frozenset({2, 5}))


def read(**given: Any) -> Any:
    return read_sampling(given, counted=False)


def test_numbers_may_be_texts() -> None:
    found = read(temperature="0.5", max_tokens="7", n="2", ignore_eos="true", min_p="0.1")
    assert (found.temperature, found.max_tokens, found.count) == (0.5, 7, 2)
    assert (found.ignore_end, dict(found.fields)) == (True, {"min_p": 0.1})


def test_a_temperature_near_0_is_the_least_of_vllm() -> None:
    found = [read(temperature=each).temperature for each in (1e-300, 1e-40, 0.01, 0.02, 0)]
    assert found == [0.01, 0.01, 0.01, 0.02, 0]


def test_parameters_of_sampling_have_no_meaning_at_temperature_0() -> None:
    assert read(temperature=0, top_p=0.5, top_k=3, repetition_penalty=1.1).fields == {
        "repetition_penalty": 1.1
    }


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_top_k_means_all_tokens(top_k: int) -> None:
    assert read(top_k=top_k).fields == {}


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    assert len({read().seed for _ in range(5)}) == 5
    assert read(seed=-1).seed == read(seed=-1).seed >= 0


@pytest.mark.parametrize(
    "neutral",
    [
        {"bad_words": [""]},
        {"stop_words": []},
        {"best_of": 1},
        {"no_repeat_ngram_size": 0},
        {"lora_name": ""},
        {"stop": None},
    ],
)
def test_a_parameter_that_asks_for_nothing_is_accepted(neutral: dict[str, Any]) -> None:
    assert read(**neutral).stops == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": {"type": "object"}}, Structure("json_schema", '{"type": "object"}')),
        ('{"choice": ["a", "\\"b"]}', Structure("grammar", 'root ::= "a" | "\\"b"')),
        ({"choice": ["\U0001f600"]}, Structure("grammar", 'root ::= "\U0001f600"')),
        ({"json_object": True}, Structure("json_schema", '{"type": "object"}')),
        ({"regex": "a+", "json": None}, Structure("regex", "a+")),
    ],
)
def test_structures_are_those_of_vllm(given: Any, expected: Structure) -> None:
    assert read(structured_outputs=given).structure == expected


def test_the_end_of_a_structure_is_not_ignored() -> None:
    assert read(ignore_eos=True).ignore_end
    assert not read(ignore_eos=True, structured_outputs={"choice": ["yes", "no"]}).ignore_end
    assert read(ignore_eos=True, structured_outputs={"json_object": False}).ignore_end


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"structured_outputs": "{"}, "is not valid JSON"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "expected one of json"),
        ({"structured_outputs": {"choice": [1]}}, "must be a list of texts"),
        ({"structured_outputs": {"regex": 3}}, "of a wrong type"),
        ({"structured_outputs": {"choice": ["\ud83d"]}}, "'choice' .* has half a character"),
        ({"structured_outputs": '{"regex": "\\ud83d"}'}, "'regex' .* has half a character"),
        ({"stop": [1]}, "expected a text or a list of texts"),
        ({"stop_token_ids": [-1]}, "expected a list of tokens"),
        ({"stop_token_ids": [2**70]}, r"'stop_token_ids' is \[1180.*expected a list of tokens"),
        ({"stop_token_ids": "[" * 5000}, "'stop_token_ids' is not valid JSON: .* too deeply"),
        ({"temperature": 10**400}, "'temperature' is 10{39}, expected a finite number"),
        ({"min_p": -(10**400)}, "'min_p' is -10{38}, expected a finite number"),
        ({"temperature": 1e300}, "'temperature' is 1e\\+300, expected a finite number of 32 bits"),
        ({"n": 0}, "'n' is 0, expected 1 to"),
        ({"max_tokens": 1.5}, "expected a whole number"),
        ({"ignore_eos": 1}, "expected true or false"),
        ({"logprobs": 1}, "or 1 at temperature 0"),
        ({"temperature": "NaN"}, "'temperature' is nan, expected a finite number"),
        ({"presence_penalty": float("inf")}, "expected a finite number"),
        ({"temperature": 0, "top_p": 2}, "'top_p' is 2, expected above 0 and at most 1"),
        ({"temperature": 0, "min_p": -1}, "'min_p' is -1, expected 0 to 1"),
        ({"temperature": 0, "top_k": -2}, "'top_k' is -2, expected at least -1"),
        ({"stop": ["a"] * 65}, "'stop' has 65 texts, expected at most 64"),
        ({"stop": "x" * 1025}, "a text of 1025 characters, expected at most 1024"),
        ({"stop": ["a", ""]}, "'stop' has an empty text"),
        ({"allowed_token_ids": []}, "'allowed_token_ids' is not supported"),
        ({"no_repeat_ngram_size": 2}, "'no_repeat_ngram_size' is not supported"),
        ({"max_toknes": 4}, "did you mean 'max_tokens'"),
        (
            {"min_tokens": 3, "structured_outputs": {"regex": "a+"}},
            "'min_tokens' is 3, expected 0 with a structured output",
        ),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(Mistake, match=error):
        read(**given)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"top_k": 2**70}, "'top_k' is 1180591620717411303424, which is out of range"),
        ({"min_tokens": 2**70}, "'min_tokens' is 1180591620717411303424, which is out of range"),
        ({"top_p": 1.5}, "top_p must be a positive float"),
    ],
)
def test_values_beyond_the_librarys_numbers_are_refused(given: dict[str, Any], error: str) -> None:
    genai: Any = pytest.importorskip("openvino_genai")
    with pytest.raises(Mistake, match=error):
        configuration(genai, read(**given), 0, TOKENS, 16)


def test_a_text_ends_at_the_models_ends_and_the_requests() -> None:
    genai: Any = pytest.importorskip("openvino_genai")
    found = configuration(genai, read(stop_token_ids=[7]), 0, TOKENS, 16)
    assert (found.eos_token_id, set(found.stop_token_ids)) == (2, {2, 5, 7})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("(yes|no)", States(6)),
        ("a{3}", States(3)),
        ("(a{2}b){10,20}", States(60)),
        (r"[a-z\]]{5}\{", States(6, 5)),
        (r".{4}[^a]\w[ab]", States(7, 6)),
        ("(((", States()),
    ],
)
def test_repetitions_multiply_the_size_of_a_pattern(pattern: str, expected: States) -> None:
    assert size("regex", pattern) == expected


def test_patterns_and_lengths_of_a_schema_are_found_everywhere() -> None:
    schema = (
        '{"anyOf": [{"pattern": "a"}], "patternProperties": {"b": {"pattern": "cc"}}, '
        '"items": {"minLength": 3, "maxLength": 7}}'
    )
    assert size("json_schema", schema) == States(4 + 7, 7)
    assert size("json_schema", "{") == States()


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("grammar", 'root ::= ")))((" (("a" | [(((]) "b") # ((((((', 2),
        ("regex", r"))((a\([((])b)", 2),
        ("json_schema", '{"a": [{"const": "}}}[[["}]}', 3),
        ("json_schema", '{"pattern": "((((a))))"}', 4),
    ],
)
def test_brackets_in_texts_and_comments_are_not_nested(kind: str, text: str, expected: int) -> None:
    assert depth(kind, text) == expected
