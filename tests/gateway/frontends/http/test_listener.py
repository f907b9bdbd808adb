"""The end of a listener: connections that are begun while it stops."""

import asyncio
import socket

import pytest

from gateway.frontends.http.listener import HttpListener, listening_at
from tests.builders import settle, soon
from tests.gateway.frontends.http.apps import app_of

GRACE_SECS = 60.0


@pytest.mark.parametrize("turns", [2, 3, 4])
async def test_a_connection_begun_after_the_stop_does_not_hold_up_the_end(turns: int) -> None:
    """It is accepted in the first turn of the event loop and begun in the third."""
    listener = HttpListener(app_of(), listening_at("127.0.0.1", 0))
    serving = asyncio.create_task(listener.serve())
    await settle()
    with socket.create_connection(("127.0.0.1", listener.port)):
        for _ in range(turns):
            await asyncio.sleep(0)
        listener.stop(GRACE_SECS)
        listener.drop_half_requests()
        await soon(serving)
