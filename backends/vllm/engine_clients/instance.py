"""One engine with several clients, serving requests."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from prometheus_client.core import Metric

from backends.vllm.engine_clients.messages import Offer
from backends.vllm.engine_clients.metrics import SharedMetrics
from backends.vllm.engine_clients.remote_client import RemoteClient
from backends.vllm.engine_clients.shared_engine import SharedEngine
from backends.vllm.watch import Watch
from gateway.backend import Answer, Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest


class SharedInstance(Instance):
    """Hands each request to the client that has the fewest."""

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
        self._engine = engine
        self._clients = clients
        self._watch = watch
        self._metrics = metrics

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return not self._watch.over

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

    async def died(self) -> str:
        return await self._watch.ended()

    def metrics(self) -> Iterable[Metric]:
        return self._metrics.collect()


def _calls(client: RemoteClient) -> int:
    return client.calls
