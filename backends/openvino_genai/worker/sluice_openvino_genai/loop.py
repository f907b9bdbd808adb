"""The loop of the engine: take in requests, step, send what is new.

A step holds the interpreter's lock, so that nothing else of this process runs meanwhile: a thread
of its own would gain nothing. All that has arrived is taken in before each step.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from sluice_llm.metrics import TokenLengths
from sluice_llm.request import Mistake
from sluice_llm.running import CANCELLED, answering, end, fail
from sluice_worker.work import worker

from .generation import RunningGeneration
from .metrics import EngineGauges

TAKE_IN_SECS = 0.05
"""Longest wait for requests that have arrived but are not yet read."""
POLL_SECS = 0.0002
GAUGES_SECS = 0.25


class GenerationLoop:
    """Generations in one engine; all but `arrived` are for its event loop.

    At most `most` sequences are in the engine at once: with `dynamic_split_fuse` the library heeds
    no limit of its own.
    """

    def __init__(
        self, pipeline: Any, gauges: EngineGauges, lengths: TokenLengths, most: int
    ) -> None:
        self._pipeline = pipeline
        self._gauges, self._lengths = gauges, lengths
        self._most = most
        self._waiting: deque[RunningGeneration] = deque()
        self._arrived: deque[Any] = deque()
        self._running: set[RunningGeneration] = set()
        self._held: set[RunningGeneration] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown = (0, 0)
        self._shown_at = 0.0

    def arrived(self, request: Any) -> None:
        """A request has arrived; for any thread."""
        self._arrived.append(request)
        if self._loop is not None and not self._wake.is_set():
            self._loop.call_soon_threadsafe(self._wake.set)

    def add(self, generation: RunningGeneration) -> None:
        """A request is ready for the engine."""
        self._waiting.append(generation)
        self._wake.set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what must not delay a step."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self, accept: Callable[[Any], None]) -> None:
        """Serve for ever; `accept` gets each request."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            await self._take_in(accept)
            self._drop_cancelled()
            self._admit()
            busy = self._pipeline.has_non_finished_requests()
            if busy:
                self._step()
            with worker().connection.gathered():
                self._deliver()
                self._show()
            # Also what is read can begin sequences.
            if not (busy or self._arrived or self._pipeline.has_non_finished_requests()):
                await self._wake.wait()

    async def _take_in(self, accept: Callable[[Any], None]) -> None:
        """Accept all that has arrived, also what this process has not read yet."""
        await asyncio.sleep(0)
        work, until = worker().work, time.monotonic() + TAKE_IN_SECS
        while not work.drained and time.monotonic() < until:  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(POLL_SECS)
        while self._arrived:
            request = self._arrived.popleft()
            with answering(request.get_response_sender()):
                accept(request)

    def _step(self) -> None:
        try:
            self._pipeline.step()
        except Exception as error:  # noqa: BLE001 - its state is unknown: the worker is restarted
            end(error)

    def _drop_cancelled(self) -> None:
        every = (*self._waiting, *self._running)
        for generation in [each for each in every if each.sender.is_cancelled()]:
            generation.cancel()
            if generation in self._running:
                self._running.discard(generation)
            else:
                self._waiting.remove(generation)
            fail(generation.sender, Mistake(CANCELLED, "CANCELLED"))

    def _admit(self) -> None:
        """Begin requests in the order of their arrival while the engine has room for them."""
        while self._waiting:
            generation = self._waiting[0]
            if self._running and self._sequences() + generation.open_sequences > self._most:
                return
            self._waiting.popleft()
            with answering(generation.sender):
                generation.begin()
                self._running.add(generation)

    def _sequences(self) -> int:
        return sum([each.open_sequences for each in self._running])

    def _deliver(self) -> None:
        for generation in [*self._running]:
            if generation.sender.is_held():
                self._wait_for_room(generation)
                continue
            done = True  # also if it fails
            with answering(generation.sender):
                done = generation.deliver()
                if done:
                    self._lengths.finished(generation.prompt_tokens, generation.tokens)
            if done:
                generation.cancel()
                self._running.discard(generation)

    def _wait_for_room(self, generation: RunningGeneration) -> None:
        """Read nothing of it until its reader has caught up; others continue."""
        if generation not in self._held:
            self._held.add(generation)
            self.start(self._caught_up(generation))

    async def _caught_up(self, generation: RunningGeneration) -> None:
        await generation.sender.room()
        self._held.discard(generation)
        self._wake.set()

    def _show(self) -> None:
        """Set the gauges if a request came or ended, with its answer, and every GAUGES_SECS."""
        counts = (len(self._running), len(self._waiting))
        if counts != self._shown or time.monotonic() - self._shown_at >= GAUGES_SECS:
            self._shown, self._shown_at = counts, time.monotonic()
            found = self._pipeline.get_metrics()
            self._gauges.show(found, self._sequences(), *counts)
