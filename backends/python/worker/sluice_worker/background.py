"""The event loop of a model whose methods are `async`: one thread, for the life of the process."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

Failed = Callable[[BaseException], None]


class Background:
    """Runs coroutines beside everything else."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._running: set[concurrent.futures.Future[Any]] = set()

    def result(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it and wait for what it returns or raises; not from a coroutine run here."""
        return self._begin(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Any], failed: Failed) -> None:
        """Run it; `failed` is told what it raises."""
        future = self._begin(coroutine)
        self._running.add(future)

        def ended(done: "concurrent.futures.Future[Any]") -> None:
            self._running.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                failed(error)

        future.add_done_callback(ended)

    def wait(self, seconds: float) -> None:
        """Wait until all that has been started has ended, but no longer."""
        concurrent.futures.wait(list(self._running), seconds)

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, daemon=True)
                thread.start()
            return self._loop
