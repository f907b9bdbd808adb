"""Models with a cache."""

from dataclasses import replace
from typing import Any

from gateway.cache.cache import LocalCache
from gateway.config import ModelResponseCache
from gateway.config.scheduling import DynamicBatching, QueuePolicy
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.threads import Threads
from tests.builders import (
    TEXT,
    ScriptedInstance,
    read_all,
    soon,
    text_request,
)
from tests.conftest import Serve

CACHED = replace(TEXT, response_cache=ModelResponseCache(enable=True))


BATCHING = DynamicBatching(
    preserve_ordering=True, default_queue_policy=QueuePolicy(max_queue_size=1)
)


ORDERED = replace(CACHED, dynamic_batching=BATCHING, max_batch_size=1)


def cached(serve: Serve, instance: ScriptedInstance, **options: Any) -> tuple[Model, LocalCache]:
    model = serve(instance, config=options.pop("config", CACHED), **options)
    cache = LocalCache(1 << 20)
    model.use_cache(cache, b"load", Threads("test", 1))
    return model, cache


def row(text: str) -> InferRequest:
    """A request for a model that batches."""
    request = text_request(text)
    return replace(request, inputs=tuple(replace(each, shape=(1, 1)) for each in request.inputs))


async def ask(model: Model, instance: ScriptedInstance, text: str = "hello") -> list[str]:
    """The answer to a request that the cache does not have."""
    with model.submit(text_request(text)) as stream:
        (await instance.begun()).finish(f"answer to {text}")
        return await soon(read_all(stream))
