"""No two kinds of frames of one channel are the same, and each fits into its byte."""

import pytest

from gateway.processes.frames import OWN_KINDS
from gateway.processes.frames import Kind as Common
from gateway.processes.kinds import Kind


def numbers(kinds: type) -> dict[str, int]:
    """What a class of kinds adds, by name."""
    return {name: value for name, value in vars(kinds).items() if name.isupper()}


def test_kinds_are_distinct_and_fit_into_their_byte() -> None:
    found = numbers(Common) | numbers(Kind)
    assert len(set(found.values())) == len(numbers(Common)) + len(numbers(Kind))
    assert all(0 <= number < 256 for number in found.values())


@pytest.mark.parametrize(("name", "number"), numbers(Kind).items())
def test_kinds_of_frontends_begin_where_their_own_may(name: str, number: int) -> None:
    assert number >= OWN_KINDS, name


@pytest.mark.parametrize(("name", "number"), numbers(Common).items())
def test_kinds_of_all_channels_end_before(name: str, number: int) -> None:
    assert number < OWN_KINDS, name
