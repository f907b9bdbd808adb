"""A connection of uvicorn whose client is the test."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Connection:
    """The bytes that a transport was given, and the number of whole answers."""

    def __init__(self) -> None:
        self.writes: list[Sequence[bytes]] = []
        self.closed = False
        self.answered = 0
        self.flow = FlowControl(cast(asyncio.Transport, self))

    def write(self, data: bytes) -> None:
        self.writes.append((data,))

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.writes.append(parts)

    def close(self) -> None:
        self.closed = True

    def answer(self) -> None:
        self.answered += 1

    @property
    def written(self) -> bytes:
        return b"".join(part for parts in self.writes for part in parts)

    def cycle(self, *, keep_alive: bool = True, **scope: Any) -> RequestResponseCycle:
        """A request that has been read; `scope` has more of its scope."""
        asked: Any = {"method": "POST", **scope}
        return RequestResponseCycle(
            scope=asked,
            transport=cast(asyncio.Transport, self),
            flow=self.flow,
            logger=logging.getLogger("test"),
            access_logger=logging.getLogger("test"),
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=self.answer,
        )
