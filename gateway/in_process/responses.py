"""Responses to the requests of a program, for threads and for tasks of any event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt
import orjson

from gateway.arrays import to_array
from gateway.errors import Code, InferenceError
from gateway.in_process.request import RequestDraft
from gateway.in_process.server_loop import (
    LocalResponses,
    ServerHandle,
    ServerLoop,
    caller,
    value_of,
)
from gateway.messages import InferResponse, Parameter, Usage
from gateway.observability.receipt import TIMING
from gateway.stream import CANCELLED, INTERRUPTED


@dataclass(frozen=True, slots=True)
class Response:
    """One response to a request, with the names of Triton's in-process API.

    `outputs` are read-only arrays by name: views of the model's memory where numpy has the
    datatype, objects of type bytes for BYTES, float32 for BF16. `final` marks the last response;
    `usage` counts the tokens that an LLM's response adds. A response with an `error` has no
    outputs, and more may follow: an error that ends its request is raised instead.
    """

    request_id: str
    outputs: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, Parameter]
    final: bool
    usage: Usage | None = None
    error: InferenceError | None = None

    @property
    def timing(self) -> Mapping[str, Any] | None:
        """The receipt of the request, in its last response, if its parameter `timing` is true.

        Its parts in milliseconds add up to `total`.
        """
        found = self.parameters.get(TIMING)
        return orjson.loads(found) if self.final and isinstance(found, str) else None


class UnreadResponses:
    """Responses that have arrived and are unread, and the end of their request.

    `over`: no further response arrives. `cut`: `close` has dropped unread ones. `cancel` is called
    at most once by `close`; any thread may.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.waiting: deque[Response] = deque()
        self.over = False
        self.cut = False
        self._request_id = request_id
        self._cancel = cancel

    def add(self, batch: Sequence[InferResponse]) -> None:
        """Add a batch; it ends the request if it is empty, or its last response is final."""
        self.over = self.over or not batch or batch[-1].final
        self.waiting.extend(_read_only(batch, self._request_id))

    def close(self) -> None:
        """Drop all, and cancel a request that is not over; idempotent."""
        self.cut = self.cut or not self.over or bool(self.waiting)
        if not self.over:
            self.over = True
            self._cancel()

    def cancel_unfinished(self) -> None:
        """Cancel a request that is not over: its reader has been dropped."""
        if not self.over:
            self._cancel()


class Responses(Iterator[Response]):
    """The responses to one request, for any thread except the server's own.

    Threads may share it: each response is returned to one of them. The end of a `with` block,
    `close` and dropping the iterator (as a `for` loop does) cancel the remaining responses.
    """

    def __init__(self, handle: ServerHandle, draft: RequestDraft) -> None:
        self._handle = handle  # an open iterator keeps the server alive
        self._request = RemoteRequest(handle.server_loop, draft)
        cancel = partial(_cancel_on_loop, handle.server_loop, self._request)
        self._unread = UnreadResponses(draft.request.id, cancel)
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked = False
        self.owner = caller()
        self._ask()
        handle.reads(self)

    def __next__(self) -> Response:
        unread = self._unread
        with self._lock:
            while not unread.cut:
                if unread.waiting:
                    return unread.waiting.popleft()
                if unread.over:
                    raise StopIteration
                self._read()
        raise _cancelled()

    def only(self) -> Response:
        """The one response of a request that has exactly one; INTERNAL if it has none or more."""
        with self:
            return _single(list(islice(self, 2)))

    def close(self) -> None:
        """Cancel the remaining responses; later reads raise CANCELLED. Idempotent, any thread."""
        self._unread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._unread.cancel_unfinished()

    def _ask(self) -> None:
        server_loop = self._handle.server_loop
        server_loop.post(server_loop.ask, self._request.batch, self._answers.put)
        self._asked = True

    def _read(self) -> None:
        """Wait for the next batch; the next read resumes an interrupted wait."""
        self.owner = caller()
        if not self._asked:
            self._ask()
        answer = self._answers.get()
        self._asked = False
        if isinstance(answer, InferenceError):
            self._unread.over = True
            raise answer
        self._unread.add(answer)


class AsyncResponses(AsyncIterator[Response]):
    """The responses to one request, for one task at a time.

    The end of a `with` or `async with` block, `close`, `aclose`, a cancelled read and dropping the
    iterator (as a `for` loop does) cancel the remaining responses.
    """

    def __init__(
        self, handle: ServerHandle, source: "LocalRequest | PostedRequest", request_id: str
    ) -> None:
        self._source = source
        self._handle = handle  # an open iterator keeps the server alive
        self._unread = UnreadResponses(request_id, source.cancel)
        self.owner = caller()
        self._reading = False
        handle.reads(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Response:
        unread = self._unread
        while not unread.cut:
            if unread.waiting:
                return unread.waiting.popleft()
            if unread.over:
                raise StopAsyncIteration
            await self._read()
        raise _cancelled()

    async def only(self) -> Response:
        """The one response of a request that has exactly one; INTERNAL if it has none or more."""
        found: list[Response] = []
        with self:
            async for response in self:
                found.append(response)
                if len(found) > 1:
                    break
        return _single(found)

    def close(self) -> None:
        """Cancel the remaining responses; later reads raise CANCELLED. Idempotent."""
        self._unread.close()

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
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
        self._unread.cancel_unfinished()

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
            self._unread.over = True
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._reading = False
        self._unread.add(batch)


class RemoteRequest:
    """A request of another thread, on the server's own loop: submitted at its first read.

    Its responses stay in the stream until they are read, so a slow reader blocks the model.
    """

    def __init__(self, server_loop: ServerLoop, draft: RequestDraft) -> None:
        self._server_loop = server_loop
        self._draft = draft
        self._stream: LocalResponses | None = None
        self._cancelled = False

    async def batch(self) -> Sequence[InferResponse]:
        """All responses that are there, at least one; none at the end. Raises InferenceError."""
        if self._cancelled:
            return ()
        if self._stream is None:
            self._stream = self._server_loop.infer(self._draft)
        return await self._stream.batch()

    def cancel(self) -> None:
        """Cancel the request; idempotent, on the server's loop."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class PostedRequest:
    """A request of a task on another loop than the server's."""

    def __init__(self, handle: ServerHandle, draft: RequestDraft) -> None:
        self._handle = handle
        self._request = RemoteRequest(handle.server_loop, draft)
        self._asked: asyncio.Future[Any] | None = handle.begin(self._request.batch)

    async def batch(self) -> Sequence[InferResponse]:
        """As `RemoteRequest.batch`."""
        asked = self._asked or self._handle.begin(self._request.batch)
        self._asked = None
        batch: Sequence[InferResponse] = value_of(await asked)
        return batch

    def cancel(self) -> None:
        """Cancel the request; idempotent, from any thread."""
        _cancel_on_loop(self._handle.server_loop, self._request)


class LocalRequest:
    """A request of a task on the server's own loop."""

    def __init__(self, handle: ServerHandle, draft: RequestDraft) -> None:
        self._handle = handle
        handle.refuse_over()
        self._stream = handle.server_loop.infer(draft)
        self.batch = self._stream.batch

    def cancel(self) -> None:
        """Cancel the request; idempotent, from any thread: the garbage collector runs in any."""
        if self._handle.here:
            self._stream.cancel()
        else:
            _cancel_on_loop(self._handle.server_loop, self._stream)


def _cancel_on_loop(server_loop: ServerLoop, request: RemoteRequest | LocalResponses) -> None:
    """Cancel a request on the server's loop; a stopped server has none."""
    with suppress(InferenceError):
        server_loop.post(request.cancel)


def _cancelled() -> InferenceError:
    return InferenceError(Code.CANCELLED, "Request was cancelled")


def _single(responses: Sequence[Response]) -> Response:
    """The only one of the first two responses; INTERNAL if there are none or two.

    Raises the first error of a response, and CANCELLED if the request was cancelled by its id.
    """
    if len(responses) > 1 and not responses[-1].outputs and responses[-1].timing is not None:
        responses = responses[:-1]  # only the receipt of the request
    for response in responses:
        if response.error is not None:
            raise response.error
    if responses and not responses[-1].outputs and CANCELLED in responses[-1].parameters:
        raise _cancelled()
    if len(responses) != 1:
        found = "several" if responses else "0"
        raise InferenceError(Code.INTERNAL, f"expected a single response, got {found}")
    return responses[0]


def _read_only(answers: Iterable[InferResponse], request_id: str) -> list[Response]:
    """The responses as arrays; a final flag without outputs ends the iterator instead."""
    return [
        Response(
            request_id,
            {tensor.name: to_array(tensor) for tensor in answer.outputs},
            answer.parameters,
            answer.final,
            answer.usage,
            answer.error,
        )
        for answer in answers
        if answer.outputs
        or not answer.final
        or answer == INTERRUPTED
        or TIMING in answer.parameters
    ]
