"""The event loop of a server inside a program, and calls to it from any thread."""

import asyncio
import atexit
import logging
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import uvloop

from gateway.errors import Code, InferenceError, unexpected
from gateway.in_process.request import RequestDraft
from gateway.messages import InferResponse
from gateway.observability.receipt import Receipt, receipt_of, with_timing
from gateway.server import Server, StartFailed
from gateway.settings import Settings
from gateway.stream import ResponseStream

T = TypeVar("T")

log = logging.getLogger("sluice.in_process")

Deliver = Callable[[Any], None]
"""Receives the answer to a question: its value, or an InferenceError."""

Caller = tuple[int, asyncio.Task[Any] | None]
"""A thread, and its running task if it runs an event loop."""

CLOSE_SECS = 10.0
"""Time for a server that was not stopped to close its parts after its drain, at program exit."""


class LocalResponses(Protocol):
    """The responses to a request, on the server's loop."""

    async def batch(self) -> list[InferResponse]:
        """See `ResponseStream.batch`; so it is with `cancel`."""

    def cancel(self) -> None:
        """Cancel the request."""


class TimedResponses:
    """The responses to a request with a receipt, which the last one has as a parameter."""

    def __init__(self, stream: ResponseStream, receipt: Receipt) -> None:
        self._stream = stream
        self._receipt = receipt

    async def batch(self) -> list[InferResponse]:
        """All unread responses; see `ResponseStream.batch`."""
        try:
            batch = await self._stream.batch()
        except BaseException:
            self._receipt.sent()
            raise
        if batch and batch[-1].final:
            batch[-1] = with_timing(batch[-1], self._receipt)
            self._receipt.sent()
        return batch

    def cancel(self) -> None:
        """Cancel the request."""
        self._stream.cancel()
        self._receipt.sent()


def not_running() -> InferenceError:
    """The error of every call after the end of the server."""
    return InferenceError(Code.UNAVAILABLE, "the server is not running: it has been stopped")


class ServerLoop:
    """Runs a server on the event loop on which it was created; other threads may only `post`."""

    def __init__(self, settings: Settings) -> None:
        self.started: Future[Mapping[str, int]] = Future()
        """The ports in use once the start-up models are loaded, or the error of the start."""
        self.ended = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self.server = Server(settings)
        self._tasks = asyncio.TaskGroup()
        self._lock = threading.RLock()  # reentrant: the garbage collector may post inside it
        self._open = True
        self._metrics_page: Any = None

    @property
    def over(self) -> bool:
        """Whether the server has ended or its event loop is closed."""
        return self.ended.is_set() or self.loop.is_closed()

    async def run(self) -> None:
        """Run until `server.stop`; `started` gets the error of a failed start.

        Every posted question is answered before this returns.
        """
        try:
            async with self._tasks:
                await self._serve()
        finally:
            self._fail(unexpected())
            self.ended.set()

    def post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call a synchronous function on the loop, in the order of the posts; from any thread.

        Raises UNAVAILABLE once the server has stopped.
        """
        with self._lock:
            if not self._open or self.over:
                raise not_running()
            self.loop.call_soon_threadsafe(callback, *arguments)

    def ask(self, question: Callable[[], Awaitable[Any]], deliver: Deliver) -> None:
        """Begin to answer a question; `deliver` is called once. On the loop only: post it."""
        task = self._tasks.create_task(_answered(question))
        task.add_done_callback(partial(_deliver, deliver))

    def infer(self, draft: RequestDraft) -> LocalResponses:
        """Submit a request; the caller owns the stream. Raises InferenceError."""
        dataplane = self.server.dataplane
        model = dataplane.model(draft.request.model, draft.request.version)
        request = draft.complete(model.config)
        if request.model != model.name:
            name, version = dataplane.address(request.model, request.version)
            request = replace(request, model=name, version=version)
        received_ns = request.received_ns
        request = dataplane.receipts.begin(request, received_ns, received_ns, wished=False)
        trace = dataplane.tracer.begin(request.model) if dataplane.tracer.on else None
        stream = dataplane.infer(request, model, trace)
        if trace is not None:
            trace.sent()
        receipt = receipt_of(request)
        return stream if receipt is None else TimedResponses(stream, receipt)

    async def metrics(self) -> str:
        """The metrics of the server and its machine; their page is imported at the first use."""
        if self._metrics_page is None:
            imported = await asyncio.to_thread(import_module, "gateway.metrics_page")
            served = self.server
            page = imported.MetricsPage(
                served.dataplane, served.settings.metrics, served.read_cache
            )
            self._metrics_page = self._metrics_page or page
        text: bytes = await self._metrics_page.render()
        return text.decode()

    async def _serve(self) -> None:
        try:
            await self.server.run(self._start)
        except (StartFailed, InferenceError) as error:
            self._fail(error)
        finally:
            with self._lock:
                self._open = False
            # Posted calls run now; the task group still answers their questions.
            await asyncio.sleep(0)

    def _start(self, ports: Mapping[str, int]) -> None:
        self.started.set_result(ports)

    def _fail(self, error: Exception) -> None:
        if self.started.done():
            return
        if not isinstance(error, InferenceError):
            error = InferenceError(Code.UNAVAILABLE, f"the server cannot start: {error}")
        self.started.set_exception(error)


async def _answered(question: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await question()
    except InferenceError as error:
        return error
    except Exception:
        # Around one request of a frontend: a defect must not end the server.
        log.exception("request failed unexpectedly")
        return unexpected()


def _deliver(deliver: Deliver, answering: asyncio.Task[Any]) -> None:
    # A question that was cancelled before it began is answered, too: its caller waits.
    deliver(not_running() if answering.cancelled() else answering.result())


class LoopThread(threading.Thread):
    """A daemon thread with an event loop and a server; a program that exits drains the server."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(name="sluice", daemon=True)
        self._settings = settings
        self._begun: Future[ServerLoop] = Future()
        self.start()
        self.server_loop = self._begun.result()

    def run(self) -> None:
        """Run the event loop until the server has ended."""
        atexit.register(self._end)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        finally:
            atexit.unregister(self._end)

    async def _serve(self) -> None:
        try:
            server_loop = ServerLoop(self._settings)
        except InferenceError as error:
            self._begun.set_exception(error)

            return
        except BaseException as error:
            self._begun.set_exception(error)
            raise
        self._begun.set_result(server_loop)
        await server_loop.run()

    def _end(self) -> None:
        with suppress(InferenceError):
            self.server_loop.post(self.server_loop.server.stop)
        self.join(self._settings.exit_timeout_secs + CLOSE_SECS)


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
