"""Members of embeddings requests to models without the contract."""

from typing import Any

import pytest

from gateway.errors import InferenceError
from gateway.frontends.http.openai.embeddings import (
    MOST_TEXTS,
    Encoding,
    read_embedding_request,
)


def refused(**members: Any) -> str:
    with pytest.raises(InferenceError) as caught:
        read_embedding_request(members, 4)
    return caught.value.message


def test_one_text_is_a_list_of_one() -> None:
    found = read_embedding_request({"input": "a"}, 4)
    assert (found.texts, found.encoding, found.dimensions) == (["a"], Encoding.FLOAT, 4)


def test_many_texts_encodings_and_dimensions_are_taken() -> None:
    members = {"input": ["a"] * MOST_TEXTS, "encoding_format": "base64", "dimensions": 1}
    found = read_embedding_request(members, 4)
    assert (len(found.texts), found.encoding, found.dimensions) == (MOST_TEXTS, "base64", 1)


def test_null_is_the_default() -> None:
    found = read_embedding_request({"input": "a", "encoding_format": None, "dimensions": None}, 4)
    assert (found.encoding, found.dimensions) == (Encoding.FLOAT, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "no list of at least one text"),
        ([], "no list of at least one text"),
        ({"a": 1}, "no list of at least one text"),
        (5, "no list of at least one text"),
        ("", "empty text at 0"),
        (["a", ""], "empty text at 1"),
        ([1, 2], "token ids"),
        ([[1], [2]], "token ids"),
        (["a", None], "something other than a text at 1"),
        (["a", {"b": 1}], "something other than a text at 1"),
        (["a"] * (MOST_TEXTS + 1), f"has {MOST_TEXTS + 1} texts, expected at most {MOST_TEXTS}"),
    ],
)
def test_an_input_that_holds_no_texts_is_refused(given: Any, message: str) -> None:
    assert message in refused(input=given)


@pytest.mark.parametrize("given", [0, 5, -1, 1.5, True, "2", [2], 10**100])
def test_dimensions_are_a_number_that_the_model_has(given: Any) -> None:
    assert "expected a number from 1 to 4" in refused(input="a", dimensions=given)


@pytest.mark.parametrize("given", ["hex", "", 1, ["float"], {"float": 1}])
def test_an_encoding_is_one_of_two(given: Any) -> None:
    assert "neither 'float' nor 'base64'" in refused(input="a", encoding_format=given)
