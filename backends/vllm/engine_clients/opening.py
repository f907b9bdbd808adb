"""From `model.json` to an instance whose engine has several clients."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from backends.vllm.engine import started
from backends.vllm.engine_clients.instance import SharedInstance
from backends.vllm.engine_clients.messages import Offer
from backends.vllm.engine_clients.metrics import SharedMetrics
from backends.vllm.engine_clients.remote_client import RemoteClient
from backends.vllm.engine_clients.shared_engine import SharedEngine
from backends.vllm.engine_errors import EngineErrors
from backends.vllm.serving.state import check_parsers
from backends.vllm.settings import EngineModel
from backends.vllm.watch import Watch
from gateway.backend import Instance

log = logging.getLogger("sluice.vllm")


async def open_shared(model: EngineModel, wasted: Callable[[int], None]) -> Instance:
    """Start the engine of a model and its clients, and put an instance before them."""
    check_parsers(model)
    log.info("starting engine", extra={"model": model.name, "clients": model.clients})
    with EngineErrors(model) as errors:
        engine = await started(model, partial(SharedEngine, model, errors.sender), _stop)
        return await _instance(model, engine, wasted)


async def _instance(
    model: EngineModel, engine: SharedEngine, wasted: Callable[[int], None]
) -> Instance:
    """Wait until its clients are ready; if that fails the engine has been stopped."""
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
    """What each offers; all offer the same."""
    return await asyncio.gather(*(client.offer() for client in clients))


async def _stop(engine: SharedEngine) -> None:
    await asyncio.to_thread(engine.stop)
