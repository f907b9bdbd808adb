"""The responses to one request, read by a task; leaving them cancels."""

from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from gateway.errors import Code, InferenceError
from gateway.in_process.handle import Link, caller
from gateway.in_process.response import Response, responses_of
from gateway.in_process.sources import Source, cancelled, single


class AsyncResponses(AsyncIterator[Response]):
    """The responses to one request, for one task at a time.

    Leaving cancels what is left: the end of a `with` or `async with` block, `close` or `aclose`, a
    read that is cancelled, and dropping the iterator, as a loop does that it was made for.
    """

    def __init__(self, link: Link, source: Source, request_id: str) -> None:
        self._source = source
        self._link = link  # whoever may still read keeps the server
        self._request_id = request_id
        self._waiting: deque[Response] = deque()
        self._over = False
        self._cut = False
        self.owner = caller()
        self._reading = False
        link.reads(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Response:
        while not self._cut:
            if self._waiting:
                return self._waiting.popleft()
            if self._over:
                raise StopAsyncIteration
            await self._read()
        raise cancelled()

    async def only(self) -> Response:
        """The one response of a request that has exactly one; INTERNAL if it has none or more."""
        found: list[Response] = []
        with self:
            async for response in self:
                found.append(response)
                if len(found) > 1:
                    break
        return single(found)

    def close(self) -> None:
        """Cancel what is left, which later reads say; idempotent."""
        self._cut = self._cut or not self._over or bool(self._waiting)
        if not self._over:
            self._over = True
            self._source.cancel()

    async def aclose(self) -> None:
        """The same, for `contextlib.aclosing`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._over:
            self._source.cancel()

    async def _read(self) -> None:
        if self._reading:
            raise InferenceError(
                Code.INVALID_ARG, "these responses are being read by another task: only one may"
            )
        self._reading = True
        self.owner = caller()
        try:
            batch = await self._source.batch()
        except InferenceError:
            self._over = True
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._reading = False
        self._over = self._over or not batch or batch[-1].final
        self._waiting.extend(responses_of(batch, self._request_id))
