"""The gate of loads: the part of rollouts in the life cycle of a model."""

from contextlib import AbstractContextManager, nullcontext

from gateway.errors import InferenceError
from gateway.models.registry import KnownModel
from gateway.models.repository import LoadSource

Within = AbstractContextManager[None]
"""A block around a load: it is entered when no other operation on the model is under way."""
NO_BLOCK: Within = nullcontext()


class VersionGate:
    """Decides about the versions of each load; this gate admits every version.

    Each load calls `admit`, then `loaded` or `failed`. `unloaded` follows an unload. All but
    `admit` are synchronous.
    """

    async def admit(self, known: KnownModel, source: LoadSource, *, again: bool) -> LoadSource:
        """The source without the versions that may not be loaded; it may change `known.held`.

        With `again` a client asks for the load, also of versions whose last load has failed.
        """
        return source

    def loaded(self, known: KnownModel) -> None:
        """Requests may find the versions of the load: called in the step that makes it so."""

    def failed(self, known: KnownModel, error: InferenceError) -> bool:
        """A load has failed; whether to load again what is admitted now."""
        return False

    def unloaded(self, known: KnownModel) -> None:
        """A model was unloaded."""
