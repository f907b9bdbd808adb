"""One server after the other for the requests of a test; a server that is broken is replaced."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.sweep.cases import ways_of
from tests.sweep.routed_server import RoutedServer
from tests.sweep.server import Server
from tests.sweep.subjects import Subject
from tests.sweep.ways import Way


class Stage:
    """The servers for one model and one kind of wires; none is left after the block."""

    def __init__(self, subject: Subject, suffix: str, repository: Path) -> None:
        self.subject = subject
        self.ways: Sequence[Way] = ways_of(subject, suffix)
        self._repository = repository
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            await self.replace()
        else:
            await self.end()

    async def server(self) -> Server:
        """The server, started now if there is none."""
        if self._server is None:
            made = RoutedServer if self.subject.at_replica else Server
            self._server = made(self.subject, self.ways[0].options, self._repository)
            try:
                await self._server.started()
            except BaseException:
                await self.replace()
                raise
        return self._server

    async def end(self) -> None:
        """Stop the server, if there is one, and wait for its end; the next use starts another."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def replace(self) -> None:
        """End the server by force; the next use starts another."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.shield(server.give_up())
