"""Models that load others before they are ready themselves."""

import pytest

from backends.python.model_management import Beginnings
from gateway.errors import InferenceError


def test_nobody_is_waited_for_who_waits_in_turn() -> None:
    beginnings = Beginnings()
    with beginnings.of("a"), beginnings.of("b"), beginnings.waiting("a", "b"):
        with beginnings.waiting("b", "c"):
            """Another one may be loaded."""
        with pytest.raises(InferenceError, match="model 'a' cannot be loaded before 'b' has"):
            beginnings.waiting("b", "a").__enter__()
        with pytest.raises(InferenceError, match="model 'b' cannot be loaded before 'b' has"):
            beginnings.waiting("b", "b").__enter__()
    with beginnings.of("b"), beginnings.waiting("b", "a"):
        """Nobody waits any more."""


def test_a_model_that_serves_may_have_itself_loaded_again() -> None:
    with Beginnings().waiting("a", "a"):
        """It goes on serving meanwhile."""
