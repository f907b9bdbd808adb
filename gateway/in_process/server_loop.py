"""The event loop of a server inside a program: the program's own, or one in a new thread."""

import asyncio
import atexit
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import uvloop

from gateway.errors import UNEXPECTED, Code, InferenceError
from gateway.in_process.request import RequestDraft
from gateway.server import Server, StartFailed
from gateway.server_info import MetricsPage
from gateway.settings import Settings
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.in_process")

Deliver = Callable[[Any], None]
"""Receives the answer to a question: its value, or an InferenceError."""

CLOSE_SECS = 10.0
"""Time for a server that was not stopped to close its parts after its drain, at program exit."""


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
            self._fail(UNEXPECTED)
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

    def infer(self, draft: RequestDraft) -> ResponseStream:
        """Submit a request; the caller owns the stream. Raises InferenceError."""
        dataplane = self.server.dataplane
        model = dataplane.model(draft.request.model, draft.request.version)
        request = draft.complete(model.config)
        trace = dataplane.tracer.begin(request.model) if dataplane.tracer.on else None
        stream = dataplane.infer(request, model, trace)
        if trace is not None:
            trace.sent()
        return stream

    @cached_property
    def metrics(self) -> MetricsPage:
        """The metrics of the server and its machine."""
        server = self.server
        return MetricsPage(server.dataplane, server.settings.metrics, server.read_cache)

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
        return UNEXPECTED


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
