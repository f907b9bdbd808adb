"""Ends of RPCs with their connection: thousands of them leave turns of the event loop to others."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from httpunk.h2.server import ServerConnection

log = logging.getLogger("sluice.grpc")

TURN_CALLS = 64
"""Calls that end an RPC take about 2 ms."""


def in_turns(calls: Iterator[Callable[[], object]]) -> None:
    """Call functions in their order: TURN_CALLS of them now, and as many in each later turn.

    One that fails is logged.
    """
    some = list(islice(calls, TURN_CALLS))
    for call in some:
        try:
            call()
        except Exception:  # around one RPC: the others end, too
            log.exception("end of an RPC failed")
    if len(some) == TURN_CALLS:
        asyncio.get_running_loop().call_soon(in_turns, calls)


class GradualEnds(ServerConnection):
    """A connection whose streams end some in each turn of the event loop when it fails."""

    def fail(self, *given: Any) -> list[tuple[Any, Any]]:
        """Override of httpunk: the connection fails. Returns the streams to notify: none.

        Each stream knows at once that it has stopped; its tasks are notified in turns.
        """
        stopped: list[tuple[Any, Any]] = super().fail(*given)
        for handle, stop in stopped:
            handle.stop = stop
        in_turns(iter([partial(self._notify_stopped, *each, True) for each in stopped]))
        return []
