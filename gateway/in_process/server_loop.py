"""The event loop on which a core lives when a program has started it, and what it does there."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

from gateway.errors import UNEXPECTED, Code, InferenceError
from gateway.in_process.request import Draft
from gateway.server import Server, StartFailed
from gateway.server_info import MetricsPage
from gateway.settings import Settings
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.in_process")

Deliver = Callable[[Any], None]
"""Takes what a question was answered: its value, or an InferenceError."""


def not_running() -> InferenceError:
    """What everybody learns who comes too late."""
    return InferenceError(Code.UNAVAILABLE, "the server is not running: it has been stopped")


class Home:
    """Made inside the running loop that is to be its own; other threads may only `post`."""

    def __init__(self, settings: Settings) -> None:
        self.started: Future[Mapping[str, int]] = Future()
        """The ports in use, once the start-up models are loaded; or why that failed."""
        self.ended = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self.server = Server(settings)
        self._tasks = asyncio.TaskGroup()
        self._lock = threading.RLock()  # garbage that is collected meanwhile may post, too
        self._open = True

    @property
    def over(self) -> bool:
        """Whether it has ended, or somebody has closed the loop around it."""
        return self.ended.is_set() or self.loop.is_closed()

    async def run(self) -> None:
        """Live until the core has been told to stop; `started` says what went wrong, if anything.

        Every question that was posted has been answered when this returns.
        """
        try:
            async with self._tasks:
                await self._live()
        finally:
            self._fail(UNEXPECTED)
            self.ended.set()

    def post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Have a plain function called on the loop, in the order of the calls; from any thread.

        Raises UNAVAILABLE once the server has stopped.
        """
        with self._lock:
            if not self._open or self.over:
                raise not_running()
            self.loop.call_soon_threadsafe(callback, *arguments)

    def ask(self, question: Callable[[], Awaitable[Any]], deliver: Deliver) -> None:
        """Begin to answer a question: `deliver` is called once, on the loop. Post it."""
        task = self._tasks.create_task(_answered(question))
        task.add_done_callback(partial(_hand_over, deliver))

    def infer(self, draft: Draft) -> ResponseStream:
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
        """The metrics of the core and its machine."""
        server = self.server
        return MetricsPage(server.dataplane, server.settings.metrics, server.read_cache)

    async def _live(self) -> None:
        try:
            await self.server.run(self._start)
        except (StartFailed, InferenceError) as error:
            self._fail(error)
        finally:
            with self._lock:
                self._open = False
            # What was posted before runs now; its questions are still answered by the group.
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
        # Around one request of a frontend: a defect must not take the server along.
        log.exception("request failed unexpectedly")
        return UNEXPECTED


def _hand_over(deliver: Deliver, answering: asyncio.Task[Any]) -> None:
    """Also what was cancelled before it began is an answer: somebody waits for it."""
    deliver(not_running() if answering.cancelled() else answering.result())
