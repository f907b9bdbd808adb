"""Aborts of requests in the engine."""

import asyncio
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils


@dataclass(eq=False)
class Running:
    """One request in the engine; `result` is what the library has given for it."""

    request_id: str
    is_cancelled: Callable[[], bool]
    result: Any
    aborted: bool = False

    def abort(self) -> None:
        """Have the engine stop; its last output then says `cancelled`."""
        if not self.aborted:
            self.aborted = True
            try:
                self.result.abort()
            except Exception as error:  # noqa: BLE001 - others are still to be watched
                pb_utils.Logger.log_error("".join(traceback.format_exception(error)))


class Live:
    """Knows all requests in the engine; used in one event loop.

    Only whoever sends is told that nobody waits, so all are asked once in `check_secs`, as at
    Triton, and never while there are none.
    """

    def __init__(self, check_secs: float) -> None:
        self._check_secs = check_secs
        self._running: set[Running] = set()
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def holding(self, running: Running) -> Iterator[Running]:
        """Watch it for the length of the block; leaving that before its end aborts it."""
        self._running.add(running)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._check())
        try:
            yield running
        except BaseException:
            running.abort()
            raise
        finally:
            self._running.discard(running)

    def stop(self, request_id: str) -> None:
        """Abort all requests of that id."""
        for running in tuple(self._running):
            if running.request_id == request_id:
                running.abort()

    async def _check(self) -> None:
        try:
            while self._running:
                await asyncio.sleep(self._check_secs)
                for running in tuple(self._running):
                    if running.is_cancelled():
                        running.abort()
        finally:
            self._watch = None
