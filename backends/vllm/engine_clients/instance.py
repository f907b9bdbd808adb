"""The instance of a shared engine: requests are distributed over its clients."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial

from prometheus_client.core import Metric

from backends.vllm.engine import started
from backends.vllm.engine_clients.messages import Offer
from backends.vllm.engine_clients.shared_engine import RemoteClient, SharedEngine
from backends.vllm.engine_processes import Watch
from backends.vllm.failures import EngineErrors
from backends.vllm.metrics import SharedMetrics
from backends.vllm.serving.serving import check_parsers
from backends.vllm.settings import EngineModel
from gateway.backend import Answer, Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest

log = logging.getLogger("sluice.vllm")


class SharedInstance(Instance):
    """Sends each request to the client with the fewest requests."""

    concurrency = None

    def __init__(
        self,
        engine: SharedEngine,
        clients: Sequence[RemoteClient],
        offer: Offer,
        watch: Watch,
        metrics: SharedMetrics,
    ) -> None:
        self.adapters = offer.adapters
        self.max_model_len = offer.max_model_len
        self.places = offer.places or None
        self._engine = engine
        self._clients = clients
        self._watch = watch
        self.death = watch.death
        self._metrics = metrics

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return not self._watch.over

    @property
    def metrics(self) -> Iterable[Metric]:
        return self._metrics.collect()

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        (request,) = requests  # without a limit of executions, each execution has one request
        client = min(self._clients, key=_calls)
        try:
            call = client.call(request)
        except InferenceError as error:
            yield 0, error
            return
        try:
            async with aclosing(call.responses()) as responses:
                async for response in responses:
                    yield 0, response
        except InferenceError as error:
            yield 0, error
        finally:
            client.returned(call)

    async def close(self) -> None:
        self._watch.close()
        for client in self._clients:
            client.close()
        await asyncio.to_thread(self._engine.stop)

    def kill(self, reason: str) -> None:
        self._watch.kill(reason)


def _calls(client: RemoteClient) -> int:
    return client.calls


async def open_shared(model: EngineModel, wasted: Callable[[int], None]) -> Instance:
    """Start the engine of a model and its clients, and return its instance."""
    check_parsers(model)
    log.info("starting engine", extra={"model": model.name, "clients": model.clients})
    with EngineErrors(model) as errors:
        engine = await started(model, partial(SharedEngine, model, errors.reporter), _stop)
        return await _instance(model, engine, wasted)


async def _instance(
    model: EngineModel, engine: SharedEngine, wasted: Callable[[int], None]
) -> Instance:
    """Wait until the clients are ready; a failure stops the engine."""
    async with AsyncExitStack() as owner:
        owner.push_async_callback(_stop, engine)
        watch = Watch(engine.processes)
        owner.callback(watch.close)
        clients = [RemoteClient(model.name, each, wasted, watch.report) for each in engine.clients]
        for client in clients:
            owner.callback(client.close)
        offers = await watch.unless_ended(_offers(clients))
        metrics = SharedMetrics(model.name, model.version, engine.metrics_folder)
        instance = SharedInstance(engine, clients, offers[0], watch, metrics)
        owner.pop_all()
    return instance


async def _offers(clients: Sequence[RemoteClient]) -> Sequence[Offer]:
    """The offers of the clients, which are equal."""
    return await asyncio.gather(*(client.offer() for client in clients))


async def _stop(engine: SharedEngine) -> None:
    await asyncio.to_thread(engine.stop)
