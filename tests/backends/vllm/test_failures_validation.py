"""Refusals of pydantic, in one line."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from backends.vllm.failures import first_mistake


class Text(BaseModel):
    """One kind of a part."""

    type: Literal["text"]


class Image(BaseModel):
    """Another kind."""

    type: Literal["image"]


class Part(BaseModel):
    """Stands for what vLLM validates."""

    count: int | float = 0
    names: list[str] = []
    stop: str | Annotated[list[str], Field(max_length=4)] = ""
    prompt: list[int] | list[list[int]] | str | list[str] = ""
    content: str | list[Text | Image] = ""


def refused(**values: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Part.model_validate(values)
    return caught.value


def test_only_the_first_mistake_is_reported_with_its_place() -> None:
    error = refused(names=["a", 1], count="many")
    assert first_mistake(error) == (
        "Input should be a valid integer, unable to parse string as an integer or Input should be "
        "a valid number, unable to parse string as a number (at count)"
    )
    assert first_mistake(refused(names=["a", 1])) == "Input should be a valid string (at names.1)"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"stop": ["a", "b", "c", "d", "e"]},
            "List should have at most 4 items after validation, not 5 (at stop)",
        ),
        ({"stop": ["a", 5]}, "Input should be a valid string (at stop.1)"),
        (
            {"stop": 5},
            "Input should be a valid string or Input should be a valid list (at stop)",
        ),
        ({"prompt": ["a", 5]}, "Input should be a valid string (at prompt.1)"),
        (
            {"prompt": [1, "a"]},
            "Input should be a valid integer, unable to parse string as an integer (at prompt.1)",
        ),
        ({"prompt": [[1], [2, {}]]}, "Input should be a valid integer (at prompt.1.1)"),
        (
            {"content": [{"type": "text"}, {"type": "sound"}]},
            "Input should be 'text' or Input should be 'image' (at content.1.type)",
        ),
        ({"content": [{}]}, "Field required (at content.0.type)"),
    ],
)
def test_of_several_types_the_best_fit_is_reported(values: dict[str, object], message: str) -> None:
    assert first_mistake(refused(**values)) == message


def test_other_errors_are_reported_unchanged() -> None:
    assert first_mistake(ValueError("no")) == "no"
    assert first_mistake(AssertionError()) == "AssertionError"
