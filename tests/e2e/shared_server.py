"""A server that many tests share."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.e2e.figures import figures
from tests.fork_server import fresh
from tests.serving import Serving, Start, serving

ENGINE = "Process EngineCore:"
"""Announces the traceback of an engine's process."""


class SharedServer:
    """A server with the model `llama`; one that a test has ended starts anew.

    It ends well, however the tests have treated it. `at_start` has the figures of the model before
    its first request.
    """

    def __init__(
        self,
        repository: Path,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start: Start = fresh,
    ) -> None:
        self.at_start: Mapping[str, float] = {}
        self._begin = partial(serving, repository, *flags, environment=environment, start=start)
        self._owner = ExitStack()
        self._server: Serving | None = None

    def get(self) -> Serving:
        """The server, running and ready."""
        if self._server is not None and self._server.process.poll() is not None:
            self.close()
        if self._server is None:
            self._server = self._owner.enter_context(self._begin())
            self.at_start = figures(self._server)
        return self._server

    def close(self) -> None:
        """End the server, if there is one."""
        ended, self._server = self._server, None
        if ended is not None:
            ended_by_test = ended.process.poll() is not None
            assert ended.stop() == 0, ended.text
            self._owner.close()
            # An engine that a test kills may write its own; another line may come between the two.
            lines = list(ended.every_line)
            own = sum(line.startswith(ENGINE) for line in lines) if ended_by_test else 0
            assert sum(line.startswith("Traceback") for line in lines) <= own, "\n".join(lines)
