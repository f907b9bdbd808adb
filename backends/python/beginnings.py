"""May a model that is not ready yet have another one loaded? Not one that waits for it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import Code, InferenceError


class Beginnings:
    """Which models initialize at this moment, and which others they wait for meanwhile.

    For all models of one server, by their names.
    """

    def __init__(self) -> None:
        self._initializing: Counter[str] = Counter()
        self._waits: list[tuple[str, str]] = []

    @contextmanager
    def of(self, model: str) -> Iterator[None]:
        """A model initializes within the block."""
        self._initializing[model] += 1
        try:
            yield
        finally:
            self._initializing[model] -= 1

    @contextmanager
    def waiting(self, model: str, other: str) -> Iterator[None]:
        """A model waits within the block until another one is loaded.

        INVALID_ARG if that one would wait for the first.
        """
        if not self._initializing[model]:
            yield
            return
        if self._leads(other, model):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{other}' cannot be loaded before '{model}' has initialized, and this "
                "waits for it",
            )
        self._waits.append((model, other))
        try:
            yield
        finally:
            self._waits.remove((model, other))

    def _leads(self, model: str, to: str) -> bool:
        return model == to or any(self._leads(b, to) for a, b in self._waits if a == model)
