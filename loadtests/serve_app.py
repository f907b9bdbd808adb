"""The peer of `fleet --ray-serve`: an echo and streams of items on Ray Serve.

`PYTHON serve_app.py PORT` runs in the environment of Ray Serve, which has no package of ours.
"""

import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

ITEM = b"data: toke\n\n"
ECHO = bytes(64)
BUSY = {"max_ongoing_requests": 1024, "ray_actor_options": {"num_cpus": 0.1}}


async def items(count: int) -> AsyncIterator[bytes]:
    """Items as fast as they are read."""
    for _ in range(count):
        yield ITEM


@serve.deployment(**BUSY)
class Behind:
    """The replica behind the handle of another one."""

    async def echo(self, data: bytes) -> bytes:
        """The data."""
        return data

    async def items(self, count: int) -> AsyncIterator[bytes]:
        """A stream."""
        async for each in items(count):
            yield each


@serve.deployment(**BUSY)
class Front:
    """The replica behind the proxy."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    async def __call__(self, request: Request) -> Response:
        """The echo, the items, or the figures of the handle."""
        body = await request.body()
        if request.url.path == "/items":
            return StreamingResponse(items(int(body)), media_type="text/event-stream")
        if request.url.path == "/handle":
            return PlainTextResponse(json.dumps(await self._measure(**json.loads(body))))
        return Response(body)

    async def _measure(self, requests: int, streams: int, count: int) -> Mapping[str, float]:
        took = []
        for _ in range(requests):
            asked = time.perf_counter()
            await self._behind.echo.remote(ECHO)
            took.append(time.perf_counter() - asked)

        async def read() -> int:
            return sum([1 async for _ in stream.remote(count)])

        stream, began = self._behind.items.options(stream=True), time.perf_counter()
        found = sum(await asyncio.gather(*(read() for _ in range(streams))))
        secs = time.perf_counter() - began
        return {"latency_us": statistics.median(took) * 1e6, "per_sec": found / secs}


def main(port: int) -> None:
    """Serve until SIGTERM."""
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "access_log": False})
    serve.run(Front.bind(Behind.bind()))
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
