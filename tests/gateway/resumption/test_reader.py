"""Ids of events: what a client sends back is understood, and what it invents is not."""

import pytest

from gateway.resumption.reader import EventId


def test_an_id_is_read_as_it_was_written() -> None:
    event = EventId("a-token_with.a.dot", 17)
    assert str(event) == "a-token_with.a.dot.17"
    assert EventId.parse(str(event)) == event


def test_spaces_around_an_id_are_no_part_of_it() -> None:
    assert EventId.parse(" abc.0 ") == EventId("abc", 0)


@pytest.mark.parametrize(
    "text",
    ["", ".", "abc", "abc.", ".1", "abc.-1", "abc.+1", "abc.1x", "abc.\u0661", "abc." + "1" * 16],
)
def test_an_invalid_id_is_none(text: str) -> None:
    assert EventId.parse(text) is None
