"""Clients of an HTTP application that no server runs."""

from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from starlette.types import ASGIApp

JSON = {"content-type": "application/json"}
Open = Callable[[ASGIApp], httpx.AsyncClient]


@pytest.fixture
async def connect() -> AsyncIterator[Open]:
    """Clients of applications; what an application raises becomes its answer, as in a server."""
    clients: list[httpx.AsyncClient] = []

    def open_client(app: ASGIApp) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        clients.append(
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=5, headers=JSON)
        )
        return clients[-1]

    yield open_client
    for client in clients:
        await client.aclose()
