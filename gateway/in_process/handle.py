"""How does a program reach its server from any thread, and what becomes of what it forgets?"""

import asyncio
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from gateway.errors import Code, InferenceError
from gateway.in_process.server_loop import Deliver, Home, not_running

T = TypeVar("T")
Task = asyncio.Task[Any]


Caller = tuple[int, Task | None]
"""A thread, and the task in it if it runs an event loop."""


class Reader(Protocol):
    """Responses that somebody may still read: `owner` is who did last, or has asked for them."""

    owner: Caller

    def close(self) -> None: ...


class Link:
    """What a program holds of a running server; when nobody holds it any more, the server ends.

    Then Python's ResourceWarning tells of it, as of files that were left open.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _end_forgotten, home)
        self._finalizer.atexit = False

    @property
    def here(self) -> bool:
        """Whether this is the thread of the server's own event loop."""
        return threading.get_ident() == self.home.thread_id

    @property
    def over(self) -> bool:
        """Whether the server has ended."""
        return self.home.over

    def stop(self) -> None:
        """Begin to end; idempotent."""
        self._finalizer.detach()
        with suppress(InferenceError):
            self.home.post(self.home.server.stop)

    def ask(self, question: Callable[[], Awaitable[T]], instead: str) -> T:
        """Wait for the answer, in any thread but the server's own; `instead` is for that one."""
        self.refuse_here(instead)
        answers: SimpleQueue[Any] = SimpleQueue()
        self.home.post(self.home.ask, question, answers.put)
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
        """Ask from another event loop, at once; the result may be an InferenceError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.home.post(self.home.ask, question, _to_loop(loop, answer))
        return answer

    def look(self, find: Callable[[], T]) -> T:
        """What a plain function finds on the server's loop; from any thread."""
        if self.here:
            self.refuse_over()
            return find()

        async def question() -> T:
            return find()

        return self.ask(question, "")

    def refuse_here(self, instead: str) -> None:
        """Raise INVALID_ARG where waiting would stop the very loop that is waited for."""
        if self.here and not self.over:
            raise InferenceError(
                Code.INVALID_ARG,
                "this would wait for the event loop that it is called on, which the server needs: "
                f"use {instead} here",
            )

    def reads(self, reader: Reader) -> None:
        """Somebody may read these responses for as long as they are kept."""
        with self._lock:
            self._readers.add(reader)

    def close_own(self, *, of_thread: bool) -> None:
        """Close what the calling task, or all of the calling thread, can read no more."""
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
        with suppress(RuntimeError):  # whoever asked has closed their loop since
            loop.call_soon_threadsafe(settle, value)

    return deliver


def caller() -> Caller:
    """Who is running."""
    try:
        return threading.get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return threading.get_ident(), None


def _end_forgotten(home: Home) -> None:
    if home.over:
        return
    with suppress(InferenceError):
        home.post(home.server.stop)
    warnings.warn(
        "a Server was dropped without stop: it ends now; use `with Server(...)`",
        ResourceWarning,
        stacklevel=1,
    )
