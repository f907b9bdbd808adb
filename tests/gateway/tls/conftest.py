"""The loops of the tests of this folder, and certificates."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.certificates import Authority, Certificate


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Connections run on the loop of `sluice serve`, and on that of programs."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def server(authority: Authority) -> Certificate:
    return authority.issue("server")
