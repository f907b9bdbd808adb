"""Workers that serve the tests of one module each, unless a test keeps one busy."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.backends.python.worker.gateway import PROBE, PlayedGateway, worker


class Probes:
    """A worker whose model runs the code it is sent, or another one if the last is still busy."""

    def __init__(self, folder: Path, *, decoupled: bool = False) -> None:
        self._folder, self._decoupled = folder, decoupled
        self._opened = ExitStack()
        self._one: PlayedGateway | None = None

    def one(self) -> PlayedGateway:
        """One that is idle: what a test has not heard must not fail those that follow."""
        if self._one is None or not self._one.idle:
            self.close()
            loaded = worker(self._folder, PROBE, decoupled=self._decoupled)
            self._one = self._opened.enter_context(loaded)
        self._one.forget()
        return self._one

    def close(self) -> None:
        """End it."""
        self._one = None
        self._opened.close()


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probes]:
    """For `probed`."""
    found = Probes(tmp_path_factory.mktemp("probe"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def decoupled_probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probes]:
    """For `decoupled`."""
    found = Probes(tmp_path_factory.mktemp("probe"), decoupled=True)
    yield found
    found.close()


@pytest.fixture
def probed(probes: Probes) -> PlayedGateway:
    """A worker whose model runs the code it is sent."""
    return probes.one()


@pytest.fixture
def decoupled(decoupled_probes: Probes) -> PlayedGateway:
    """The same, and its model is decoupled."""
    return decoupled_probes.one()


@pytest.fixture(scope="session")
def number() -> Callable[[], int]:
    """Numbers of requests, each once."""
    return itertools.count(1).__next__
