"""The requests in flight of all models: the cancellation of one by its name."""

import logging
from collections import Counter
from collections.abc import Collection, Iterator

from gateway.errors import Code, InferenceError, no_longer_valid
from gateway.models.loaded_models import LoadedModels
from gateway.models.registry import ModelRegistry
from gateway.policy.caller import Caller, tenant_of
from gateway.request_name import Interruptible, RequestName
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.server")


class RunningRequests:
    """The requests in flight, whose names their clients choose."""

    def __init__(self, loaded: LoadedModels, registry: ModelRegistry) -> None:
        self._loaded = loaded
        self._registry = registry

    def cancel(
        self,
        name: RequestName,
        own: Collection[Interruptible] = (),
        caller: Caller | None = None,
        *,
        only_own: bool = False,
    ) -> None:
        """Cancel the requests of that name; their readers get a last response that says so.

        If the RPC has streams of that name, `own`, only those are cancelled; with `only_own`
        no others ever are. Raises INVALID_ARG for a name without an id, NOT_FOUND if no such
        request runs, or the model does not exist for the caller.
        """
        if caller is not None and not caller.sees(name.model):
            raise self._registry.absent(name.model)
        if not name.id:
            raise InferenceError(
                Code.INVALID_ARG, "what is to be cancelled must be named: the id is missing"
            )
        chosen: Collection[Interruptible] = own
        if not (own or only_own):
            chosen = tuple(self._named(name))
        interrupted = [stream.interrupt() for stream in chosen]
        if not any(interrupted):
            self._registry.find(name.model, name.version)
            raise InferenceError(
                Code.NOT_FOUND, f"model '{name.model}' runs no request with the id '{name.id}'"
            )

    def abandon_invalid(self) -> None:
        """End the requests in flight whose caller is no longer valid."""
        for _, stream in self._loaded.requests():
            if stream.caller is None or stream.caller.valid:
                continue
            try:
                stream.abandon(no_longer_valid())
            except Exception:  # around one request: the others end, and the server continues
                log.exception("request not ended")

    def by_tenant(self) -> Counter[str]:
        """The requests of each tenant's clients: none that a model makes for one of them."""
        return Counter(
            tenant_of(stream.caller)
            for _, stream in self._loaded.requests()
            if stream.model is not None
        )

    def _named(self, name: RequestName) -> Iterator[ResponseStream]:
        """The requests in flight of that name, which reads every request."""
        for model, stream in self._loaded.requests():
            tenant = tenant_of(stream.caller)
            if name.means(RequestName(model.name, model.version, stream.request_id, tenant)):
                yield stream
