"""Values that only the type checker freezes."""

from dataclasses import field, replace

import pytest

from gateway.tensor import keyword_value, value


@value
class Pair:
    """Two things."""

    left: int
    right: int = field(default=0, compare=False)


@keyword_value
class Named:
    """By keyword only."""

    name: str = ""


def test_values_are_equal_by_their_fields_and_can_be_keys() -> None:
    assert Pair(1, 2) == Pair(1, 3) != Pair(2)
    assert {Pair(1): "found"}[Pair(1, 5)] == "found"


def test_a_value_can_be_replaced_by_one_that_differs() -> None:
    assert replace(Pair(1, 2), left=4) == Pair(4, 2)


def test_a_value_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError):
        Pair(1).other = 3  # type: ignore[attr-defined]


def test_a_value_made_by_keyword_takes_nothing_else() -> None:
    assert Named(name="a").name == "a"
    with pytest.raises(TypeError):
        Named("a")  # type: ignore[misc]
