"""Models that load others before they are ready themselves."""

import pytest

from backends.python.business_logic import LoadCycles
from gateway.errors import InferenceError


def test_a_load_that_would_wait_for_its_caller_is_refused() -> None:
    load_cycles = LoadCycles()
    with load_cycles.of("a"), load_cycles.of("b"), load_cycles.waiting("a", "b"):
        with load_cycles.waiting("b", "c"):
            """Another one may be loaded."""
        with pytest.raises(InferenceError, match="model 'a' cannot be loaded before 'b' has"):
            load_cycles.waiting("b", "a").__enter__()
        with pytest.raises(InferenceError, match="model 'b' cannot be loaded before 'b' has"):
            load_cycles.waiting("b", "b").__enter__()
    with load_cycles.of("b"), load_cycles.waiting("b", "a"):
        """No model waits any more."""


def test_a_model_that_serves_may_have_itself_loaded_again() -> None:
    with LoadCycles().waiting("a", "a"):
        """It continues to serve meanwhile."""
