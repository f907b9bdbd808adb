"""What pydantic refuses, in one line."""

import pytest
from pydantic import BaseModel, ValidationError

from backends.vllm.validation import first_mistake


class Part(BaseModel):
    """Stands for what vLLM validates."""

    count: int | float = 0
    names: list[str] = []


def refused(**values: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Part.model_validate(values)
    return caught.value


def test_only_the_first_mistake_is_told_and_where_it_is() -> None:
    error = refused(names=["a", 1], count="many")
    assert first_mistake(error) == (
        "Input should be a valid integer, unable to parse string as an integer (at count.int)"
    )
    assert first_mistake(refused(names=["a", 1])) == "Input should be a valid string (at names.1)"


def test_other_errors_are_told_as_they_are() -> None:
    assert first_mistake(ValueError("no")) == "no"
    assert first_mistake(AssertionError()) == "AssertionError"
