"""The instance of a model that replicas host: each request is sent to one of them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random

from gateway.backend import Answer, Instance
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.fleet.choice import Demand, ReplicaState, choose
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.offers import Key, ModelOffer
from gateway.fleet.prefixes import rendezvous
from gateway.messages import InferRequest, SequenceTag

log = logging.getLogger("sluice.fleet")

REPLAY = "replay"
"""The parameter of a model whose requests may be executed twice."""
WITH_EFFECTS = frozenset({"python", "ensemble"})
"""Backends whose executions may have effects besides their responses."""

ANY_REQUEST = Demand()
"""A request of a model without tokens."""

Connections = Callable[[], Sequence[ReplicaConnection]]


class FleetInstance(Instance):
    """One version of a model at replicas; `connections` are all those of the router.

    A request whose replica is lost before its first response is sent to another one, once, unless
    its execution may have had effects.
    """

    concurrency = None

    def __init__(self, config: ModelConfig, offer: ModelOffer, connections: Connections) -> None:
        self.adapters = offer.adapters
        self.max_model_len = offer.max_model_len or None
        self._key: Key = (offer.name, offer.version)
        self._version = str(offer.version)
        self._connections = connections
        self._is_repeatable = _is_repeatable(config)
        self._random = Random()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        (request,) = requests  # without a limit of executions, each execution has one request
        sent = replace(request, version=self._version)
        tried: list[ReplicaConnection] = []
        while True:
            replica = self._choice(request, tried)
            if replica is None:
                yield 0, self._nowhere()
                return
            tried.append(replica)
            has_begun = is_lost = False
            try:
                with replica.call(self._key, sent) as call:
                    try:
                        async with aclosing(call.responses()) as responses:
                            async for response in responses:
                                has_begun = True
                                yield 0, response
                        return
                    finally:
                        is_lost = call.is_lost
            except InferenceError as error:
                refused = self._lost(replica, has_begun=has_begun) if is_lost else error
            may_repeat = self._is_repeatable if is_lost else _is_draining(replica, refused)
            if has_begun or len(tried) > 1 or not may_repeat:
                yield 0, refused
                return
            extra = {"model": self._key[0], "id": request.id, "replica": replica.address}
            log.warning("request repeated", extra=extra)

    async def check_ready(self) -> None:
        if not any(each.serves(self._key) for each in self._connections()):
            raise self._nowhere()

    async def close(self) -> None:
        """Nothing is held between requests."""

    def _choice(
        self, request: InferRequest, tried: Collection[ReplicaConnection]
    ) -> ReplicaConnection | None:
        """The replica with the fewest requests; that of its sequence for a request of one."""
        found = [each for each in self._connections() if each.serves(self._key)]
        if request.sequence is not None and request.sequence.correlation_id not in (0, ""):
            return self._pinned(request.sequence, found, tried)
        by_load = {each.loads[self._key]: each for each in found if each not in tried}
        now = asyncio.get_running_loop().time()
        chosen = choose(ANY_REQUEST, by_load, now=now, random=self._random)
        return None if chosen is None else by_load[chosen]

    def _pinned(
        self,
        sequence: SequenceTag,
        found: Collection[ReplicaConnection],
        tried: Collection[ReplicaConnection],
    ) -> ReplicaConnection | None:
        """The replica of a sequence, which every router finds."""
        pin = repr((self._key, sequence.key)).encode()
        by_id = {each.id: each for each in found}
        chosen = next((by_id[each] for each in rendezvous(pin, by_id)), None)
        return None if chosen in tried else chosen

    def _nowhere(self) -> InferenceError:
        name, version = self._key
        states = ", ".join(dict.fromkeys(map(self._trouble, self._connections())))
        return InferenceError(
            Code.UNAVAILABLE,
            f"model '{name}' version {version} has no replica that takes requests ({states}); "
            "retry shortly",
        )

    def _trouble(self, replica: ReplicaConnection) -> str:
        if replica.state is None:
            return replica.trouble
        if replica.state is not ReplicaState.READY:
            return f"it is {replica.state}"
        offer = replica.models.get(self._key)
        if offer is None:
            return "it does not host the model"
        if replica.serves(self._key):
            return f"it has {offer.most_in_flight} requests in flight, the most it accepts"
        return offer.trouble or "it has not answered for some seconds"

    def _lost(self, replica: ReplicaConnection, *, has_begun: bool) -> InferenceError:
        effects = "" if self._is_repeatable or has_begun else "; it may have had effects"
        when = "after its first response" if has_begun else "while it executed the request"
        return InferenceError(
            Code.UNAVAILABLE,
            f"model '{self._key[0]}': replica {replica.id} was lost {when}{effects}",
        )


def _is_repeatable(config: ModelConfig) -> bool:
    backend = "ensemble" if config.ensemble_scheduling is not None else config.backend
    return backend not in WITH_EFFECTS or config.parameters.get(REPLAY) == "true"


def _is_draining(replica: ReplicaConnection, error: InferenceError) -> bool:
    """Whether a replica refused a request because it is about to end."""
    is_ready = replica.state is ReplicaState.READY
    return error.code is Code.UNAVAILABLE and not is_ready
