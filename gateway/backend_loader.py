"""From a backend's name to its Backend, imported only when a model needs it."""

import threading
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from gateway.backend import Backend
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS

GROUP = "sluice.backends"


class BackendLoader:
    """The installed backends, found by the entry-point group `sluice.backends`.

    `settings` are those of `--backend-config` by backend; those under "" hold for every backend.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, str]] = NO_PARAMETERS) -> None:
        self._settings = settings
        self._loading = threading.Lock()
        self._found = {point.name: point for point in entry_points(group=GROUP)}
        self._loaded: dict[str, Backend] = {}

    @property
    def names(self) -> list[str]:
        """Which backends are installed."""
        return sorted(self._found)

    def get(self, name: str) -> Backend:
        """The backend of that name, created at its first use; it may import for seconds.

        Raises InferenceError naming the installed ones, or the package that is missing.
        """
        with self._loading:  # models load in several threads
            if name not in self._loaded:
                backend = _create(self.find(name))
                backend.settings = {**self._settings.get("", {}), **self._settings.get(name, {})}
                self._loaded[name] = backend
            return self._loaded[name]

    def find(self, name: str) -> EntryPoint:
        """Where the backend of that name is, without importing it; InferenceError if nowhere."""
        point = self._found.get(name)
        if point is None:
            raise InferenceError(
                Code.INVALID_ARG,
                f"unable to find backend '{name}'; installed backends: {', '.join(self.names)}",
            )
        return point


def _create(point: EntryPoint) -> Backend:
    try:
        backend = point.load()()
    except ImportError as error:
        raise InferenceError(
            Code.UNAVAILABLE,
            f"backend '{point.name}' cannot be imported: {error}; install what it needs",
        ) from error
    if not isinstance(backend, Backend):
        raise InferenceError(
            Code.INTERNAL, f"backend '{point.name}' is no gateway.backend.Backend: {point.value}"
        )
    return backend
