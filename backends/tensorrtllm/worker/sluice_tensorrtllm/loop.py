"""The one event loop in which requests are handed to the engine and its outputs are awaited."""

import asyncio
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import triton_python_backend_utils as pb_utils


class Loop:
    """Runs coroutines on a thread of its own, for the life of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[Future[Any]] = set()
        threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it beside everything else; what it raises is logged."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._ended)

    def stop(self) -> None:
        """Run nothing any more; what has not ended is left where it is."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _ended(self, future: "Future[Any]") -> None:
        self._tasks.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
