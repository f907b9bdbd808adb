"""One server per module, on models of backends that need no engine; checked when it ends."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.clients import WIRES, Client, connect
from tests.conformance.models import write_repository
from tests.routed import AnyRouter
from tests.scripted import installed
from tests.serving import WAIT_SECS, Serving, serving


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The catalogue of models on disk."""
    folder = tmp_path_factory.mktemp("repository")
    write_repository(folder)
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a server finds the backend `scripted`."""
    return installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest,
    repository: Path,
    environment: dict[str, str],
    server_kind: None,
) -> Iterator[Serving]:
    """A server with the module's FLAGS; however it was treated, it ends well.

    Its log has the traceback of each execution that failed unexpectedly, and no other.
    """
    flags = getattr(request.module, "FLAGS", ())
    with serving(repository, *flags, environment=environment) as started:
        yield started
    for each in (started, *started.others, *started.hosts):
        check_ended_well(each)


def check_ended_well(server: Serving) -> None:
    """A server has ended with success, and its log has no traceback but of failed executions."""
    assert server.process.returncode == 0, server.log[-100:]
    crashes = server.text.count('] "execution failed')
    tracebacks = [
        server.log[number : number + 60]
        for number, line in enumerate(server.log)
        if "Traceback (most recent call last)" in line
    ]
    assert len(tracebacks) == crashes, tracebacks[0]


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx.Client]:
    """A plain HTTP client of the module's server: each request goes to any of its routers."""
    transport = AnyRouter(server)
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS, transport=transport) as found:
        yield found


@pytest.fixture(params=WIRES)
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    """Each of the four official clients in turn."""
    async with connect(server, request.param) as found:
        yield found
