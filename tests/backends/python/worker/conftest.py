"""Workers that serve the tests of one module each."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.backends.python.worker.gateway import PROBE, PlayedGateway, worker


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedGateway]:
    """A worker whose model runs the code it is sent."""
    with worker(tmp_path_factory.mktemp("probe"), PROBE) as found:
        yield found


@pytest.fixture(scope="module")
def decoupled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedGateway]:
    """The same, and its model is decoupled."""
    with worker(tmp_path_factory.mktemp("probe"), PROBE, decoupled=True) as found:
        yield found


@pytest.fixture(scope="session")
def number() -> Callable[[], int]:
    """Numbers of requests, each once."""
    return itertools.count(1).__next__
