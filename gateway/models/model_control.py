"""How a model asks for others to be loaded: the registry, as `ModelControl` has it."""

from collections.abc import Mapping

from gateway.errors import Code, InferenceError
from gateway.models.model import Model
from gateway.models.registry import ModelRegistry
from gateway.models.upload import Override


class RegistryControl:
    """Implements `ModelControl`; nothing can be changed before the start-up models are loaded."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload a model as a client may (model repository extension)."""
        self._refuse_if_starting()
        override = Override(config or None, files) if config or files else None
        await self._registry.load(name, override)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Begin to unload a model as a client may."""
        self._refuse_if_starting()
        await self._registry.unload(name, unload_dependents=unload_dependents)

    def ready(self, name: str, version: str) -> bool:
        """Whether a request would be taken; False for what is not known, too."""
        try:
            return self._find(name, version).ready
        except InferenceError as error:
            if error.code is Code.INVALID_ARG:
                raise
            return False

    def decoupled(self, name: str, version: str) -> bool:
        """Whether it answers with any number of responses."""
        return self._find(name, version).config.decoupled

    def _find(self, name: str, version: str) -> Model:
        return self._registry.find(name, version)

    def _refuse_if_starting(self) -> None:
        if not self._registry.settled:
            raise InferenceError(Code.UNAVAILABLE, "Server not ready")
