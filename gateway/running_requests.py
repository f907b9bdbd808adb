"""The requests in flight of all models: the cancellation of one by its name."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator

from gateway.errors import Code, InferenceError, no_longer_valid
from gateway.models.loaded_models import LoadedModels
from gateway.models.registry import ModelRegistry
from gateway.policy.caller import Caller, tenant_of
from gateway.request_name import Interruptible, RequestName
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.server")


Cancelled = Callable[[RequestName], Awaitable[bool]]
"""Cancels the requests of a name, and returns whether there was one."""


class RunningRequests:
    """The requests in flight, whose names their clients choose.

    `elsewhere` cancels those of the other routers of a fleet.
    """

    def __init__(self, loaded: LoadedModels, registry: ModelRegistry) -> None:
        self.elsewhere: Cancelled | None = None
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
        if not self._interrupted(name, own, caller, only_own=only_own):
            self._registry.find(name.model, name.version)
            raise _absent(name)

    async def cancel_anywhere(
        self,
        name: RequestName,
        own: Collection[Interruptible] = (),
        caller: Caller | None = None,
        *,
        only_own: bool = False,
    ) -> None:
        """As `cancel`, at the other routers of a fleet if no request of that name runs here."""
        if not self._interrupted(name, own, caller, only_own=only_own):
            model, elsewhere = self._registry.find(name.model, name.version), self.elsewhere
            may_be_there = model.of_fleet and not (own or only_own)
            if elsewhere is None or not may_be_there or not await elsewhere(name):
                raise _absent(name)

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

    def _interrupted(
        self,
        name: RequestName,
        own: Collection[Interruptible],
        caller: Caller | None,
        *,
        only_own: bool,
    ) -> bool:
        """Cancel the requests here, and return whether there was one."""
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
        return any(interrupted)

    def _named(self, name: RequestName) -> Iterator[ResponseStream]:
        """The requests in flight of that name, which reads every request."""
        for model, stream in self._loaded.requests():
            tenant = tenant_of(stream.caller)
            if name.means(RequestName(model.name, model.version, stream.request_id, tenant)):
                yield stream


def _absent(name: RequestName) -> InferenceError:
    text = f"model '{name.model}' runs no request with the id '{name.id}'"
    return InferenceError(Code.NOT_FOUND, text)
