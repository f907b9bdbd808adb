"""From a backend's name to its Backend, imported only when a model needs it."""

from importlib.metadata import EntryPoint, entry_points

from gateway.backend import Backend
from gateway.errors import Code, InferenceError

GROUP = "sluice.backends"


class BackendLoader:
    """The installed backends, found by the entry-point group `sluice.backends`."""

    def __init__(self) -> None:
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
        if name not in self._loaded:
            self._loaded[name] = _create(self.find(name))
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
