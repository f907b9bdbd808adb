"""From a config and its version folder to a loaded Model."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from gateway.backend import Instance, ModelContext
from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig
from gateway.messages import InferRequest
from gateway.models.model import Limits, Model
from gateway.models.normalisation import check_tensors
from gateway.observability.statistics import ModelStatistics
from gateway.stream import ResponseStream

Infer = Callable[[InferRequest], ResponseStream]
Load = Callable[[], Awaitable[Instance]]


class ModelLoader:
    """Loads one version at a time; what blocks is done off the event loop."""

    def __init__(self, backends: BackendLoader, store: Path, infer: Infer) -> None:
        self._backends = backends
        self._store = store
        self._infer = infer

    async def load(self, config: ModelConfig, version: int, path: Path) -> Model:
        """The version in folder `path`, all its instances loaded.

        Raises InferenceError that says why not; nothing stays loaded then.
        """
        backend = await asyncio.to_thread(self._backends.get, config.backend)
        complete = await asyncio.to_thread(backend.complete, config, path)
        check_tensors(complete)
        Limits.read(complete)  # refused here, there is nothing to close yet
        statistics = ModelStatistics()
        context = ModelContext(
            config=complete,
            path=path,
            store=self._store,
            infer=self._infer,
            wasted=statistics.waste,
        )
        load = partial(backend.load, context)
        instances = await _load_instances(_instance_count(complete), load)
        return Model(complete, version, statistics, instances, load)


def _instance_count(config: ModelConfig) -> int:
    return sum(max(1, group.count) for group in config.instance_group) or 1


async def _load_instances(count: int, load: Load) -> list[Instance]:
    instances: list[Instance] = []
    try:
        while len(instances) < count:
            instances.append(await load())
    except BaseException:
        for instance in instances:
            await instance.close()
        raise
    return instances
