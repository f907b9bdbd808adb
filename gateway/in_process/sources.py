"""Where do the responses to a program's request come from: this event loop, or another one?"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from gateway.errors import Code, InferenceError
from gateway.in_process.handle import Link, value_of
from gateway.in_process.request import Draft
from gateway.in_process.response import Response
from gateway.in_process.server_loop import Home
from gateway.messages import InferResponse
from gateway.stream import CANCELLED, ResponseStream


class Source(Protocol):
    """Where a task gets its responses from: a ResponseStream, or one of another loop."""

    async def batch(self) -> Sequence[InferResponse]:
        """All that are there, at least one; none once there are no more."""

    def cancel(self) -> None:
        """Nobody waits any more; idempotent."""


class RemoteRequest:
    """A request of another thread, on the server's own loop: submitted when it is first read.

    Its responses stay in the stream until they are asked for, so that a reader who does not read
    holds back the model.
    """

    def __init__(self, home: Home, draft: Draft) -> None:
        self._home = home
        self._draft = draft
        self._stream: ResponseStream | None = None
        self._cancelled = False

    async def batch(self) -> Sequence[InferResponse]:
        """As the stream has them. Raises InferenceError."""
        if self._cancelled:
            return ()
        if self._stream is None:
            self._stream = self._home.infer(self._draft)
        return await self._stream.batch()

    def cancel(self) -> None:
        """Nobody waits any more; on the server's loop."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class RemoteSource:
    """A request of a task on another loop than the server's."""

    def __init__(self, link: Link, draft: Draft) -> None:
        self._link = link
        self._request = RemoteRequest(link.home, draft)
        self._asked: asyncio.Future[Any] | None = link.begin(self._request.batch)

    async def batch(self) -> Sequence[InferResponse]:
        """As the stream has them. Raises InferenceError."""
        asked = self._asked or self._link.begin(self._request.batch)
        self._asked = None
        batch: Sequence[InferResponse] = value_of(await asked)
        return batch

    def cancel(self) -> None:
        """Nobody waits any more; from any thread."""
        post_if_running(self._link.home, self._request)


class LocalSource:
    """A request of a task on the server's own loop."""

    def __init__(self, link: Link, draft: Draft) -> None:
        self._link = link
        link.refuse_over()
        self._stream = link.home.infer(draft)
        self.batch = self._stream.batch

    def cancel(self) -> None:
        """Nobody waits any more; from any thread, as the garbage collector runs in any."""
        if self._link.here:
            self._stream.cancel()
        else:
            post_if_running(self._link.home, self._stream)


def post_if_running(home: Home, request: RemoteRequest | ResponseStream) -> None:
    """Cancel a request on the server's loop; a server that has stopped has none."""
    with suppress(InferenceError):
        home.post(request.cancel)


def cancelled() -> InferenceError:
    """What a read of responses says that somebody has left."""
    return InferenceError(Code.CANCELLED, "Request was cancelled")


def single(responses: Sequence[Response]) -> Response:
    """The only one of the first two responses; INTERNAL if there is none, or another.

    Raises the first error of a response, and CANCELLED if the request was cancelled by its id.
    """
    for response in responses:
        if response.error is not None:
            raise response.error
    if responses and not responses[-1].outputs and CANCELLED in responses[-1].parameters:
        raise cancelled()
    if len(responses) != 1:
        found = "several" if responses else "0"
        raise InferenceError(Code.INTERNAL, f"expected a single response, got {found}")
    return responses[0]
