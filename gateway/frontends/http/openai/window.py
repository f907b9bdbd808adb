"""Many requests on behalf of one: at most so many at once, answered in order, left together."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream

BURST = 32
"""So many are submitted in a row before others have their turn."""


class RequestWindow(AbstractContextManager["RequestWindow"]):
    """Inside `with`, `take` gives the one response of each request; leaving cancels the rest.

    One task takes. A model that has no room gets as many at once as it took; only if that is
    none, its error is raised.
    """

    def __init__(
        self,
        submit: Callable[[InferRequest], ResponseStream],
        requests: Sequence[InferRequest],
        limit: int,
    ) -> None:
        self._submit = submit
        self._requests = deque(requests)
        self._limit = limit
        self._streams: deque[ResponseStream] = deque()

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Say that nobody waits any more; idempotent. Who still takes gets CANCELLED."""
        self._requests.clear()
        for stream in self._streams:
            stream.cancel()

    async def take(self) -> InferResponse | None:
        """The next response, None after the last; raises what that request has ended with."""
        await self._fill()
        if not self._streams:
            return None
        response = await self._streams[0].only()
        self._streams.popleft()
        return response

    async def _fill(self) -> None:
        while self._requests and len(self._streams) < self._limit:
            try:
                self._streams.append(self._submit(self._requests[0]))
            except InferenceError as error:
                if error.code is not Code.UNAVAILABLE or not self._streams:
                    raise
                self._limit = len(self._streams)
                return
            self._requests.popleft()
            if len(self._requests) % BURST == 0:
                await asyncio.sleep(0)
