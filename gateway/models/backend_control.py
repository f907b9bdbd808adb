"""Loads and unloads of models, and questions about them, by a model."""

from collections.abc import Mapping

from gateway.errors import Code, InferenceError
from gateway.models.model import Model
from gateway.models.model_folder import Override
from gateway.models.repository_control import LOAD, MODEL, UNLOAD, RepositoryControl, audited
from gateway.policy.audit import AuditLog


class BackendControl:
    """Implements `ModelControl`, the calls that a model may make on other models.

    Raises UNAVAILABLE until the start-up models are loaded.
    """

    def __init__(self, control: RepositoryControl, audit: AuditLog | None = None) -> None:
        self._control = control
        self._registry = control.registry
        self._audit = audit

    async def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload a model, as a client can (model repository extension)."""
        self._refuse_if_starting()
        override = Override(config or None, files) if config or files else None
        with audited(self._audit, MODEL, LOAD, name):
            await self._control.load(name, override)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Begin to unload a model, as a client can."""
        self._refuse_if_starting()
        with audited(self._audit, MODEL, UNLOAD, name):
            await self._control.unload(name, unload_dependents=unload_dependents)

    def ready(self, name: str, version: str) -> bool:
        """Whether a request would be accepted; False for an unknown model."""
        try:
            return self._find(name, version).ready
        except InferenceError as error:
            if error.code is Code.INVALID_ARG:
                raise
            return False

    def decoupled(self, name: str, version: str) -> bool:
        """Whether a request to the model may have any number of responses."""
        return self._find(name, version).decoupled

    def _find(self, name: str, version: str) -> Model:
        return self._registry.find(name, version)

    def _refuse_if_starting(self) -> None:
        if not self._registry.settled:
            raise InferenceError(Code.UNAVAILABLE, "Server not ready")
