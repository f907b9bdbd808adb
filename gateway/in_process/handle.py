"""The handle of a running server: calls from any thread, and the end of a forgotten server."""

import asyncio
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from gateway.errors import Code, InferenceError
from gateway.in_process.server_loop import Deliver, ServerLoop, not_running

T = TypeVar("T")
Task = asyncio.Task[Any]


Caller = tuple[int, Task | None]
"""A thread, and its running task if it runs an event loop."""


class OpenResponses(Protocol):
    """Responses that may still be read; `owner` read them last, or requested them."""

    owner: Caller

    def close(self) -> None: ...


class ServerHandle:
    """A running server; dropping the last reference stops it with a ResourceWarning."""

    def __init__(self, server_loop: ServerLoop) -> None:
        self.server_loop = server_loop
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[OpenResponses] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _end_forgotten, server_loop)
        self._finalizer.atexit = False

    @property
    def here(self) -> bool:
        """Whether this is the thread of the server's own event loop."""
        return threading.get_ident() == self.server_loop.thread_id

    @property
    def over(self) -> bool:
        """Whether the server has ended."""
        return self.server_loop.over

    def stop(self) -> None:
        """Begin to stop; idempotent."""
        self._finalizer.detach()
        with suppress(InferenceError):
            self.server_loop.post(self.server_loop.server.stop)

    def ask(self, question: Callable[[], Awaitable[T]], instead: str) -> T:
        """Wait for the answer; on the server's own thread the error names `instead`."""
        self.refuse_here(instead)
        answers: SimpleQueue[Any] = SimpleQueue()
        self.server_loop.post(self.server_loop.ask, question, answers.put)
        answer: T = value_of(answers.get())
        return answer

    async def async_ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Await the answer on any event loop."""
        if self.here:
            self.refuse_over()
            return await question()
        answer: T = value_of(await self.begin(question))
        return answer

    def begin(self, question: Callable[[], Awaitable[Any]]) -> "asyncio.Future[Any]":
        """Post a question from another event loop; the result may be an InferenceError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.server_loop.post(self.server_loop.ask, question, _to_loop(loop, answer))
        return answer

    def look(self, find: Callable[[], T]) -> T:
        """Call a synchronous function on the server's loop and return its result; any thread."""
        if self.here:
            self.refuse_over()
            return find()

        async def question() -> T:
            return find()

        return self.ask(question, "")

    def refuse_here(self, instead: str) -> None:
        """Raise INVALID_ARG on the server's own thread, where waiting would block its loop."""
        if self.here and not self.over:
            raise InferenceError(
                Code.INVALID_ARG,
                "this would wait for the event loop that it is called on, which the server needs: "
                f"use {instead} here",
            )

    def reads(self, reader: OpenResponses) -> None:
        """Remember responses that may still be read, by weak reference."""
        with self._lock:
            self._readers.add(reader)

    def close_own(self, *, of_thread: bool) -> None:
        """Close the responses of the calling task, or of all tasks of the calling thread."""
        me = caller()
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            if reader.owner == me or (of_thread and reader.owner[0] == me[0]):
                reader.close()

    def refuse_over(self) -> None:
        """Raise UNAVAILABLE if the server has ended."""
        if self.over:
            raise not_running()


def value_of(answer: Any) -> Any:
    """The value of an answer; raises it if it is an error."""
    if isinstance(answer, InferenceError):
        raise answer
    return answer


def _to_loop(loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Any]") -> Deliver:
    def settle(value: Any) -> None:
        if not answer.done():
            answer.set_result(value)

    def deliver(value: Any) -> None:
        with suppress(RuntimeError):  # the loop of the caller is closed
            loop.call_soon_threadsafe(settle, value)

    return deliver


def caller() -> Caller:
    """The running thread and task."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return threading.get_ident(), None


def _end_forgotten(server_loop: ServerLoop) -> None:
    if server_loop.over:
        return
    with suppress(InferenceError):
        server_loop.post(server_loop.server.stop)
    warnings.warn(
        "a Server was dropped without stop: it ends now; use `with Server(...)`",
        ResourceWarning,
        stacklevel=1,
    )
