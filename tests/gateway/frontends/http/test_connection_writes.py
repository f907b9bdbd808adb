import asyncio

import pytest

from gateway.frontends.http.request_scope import JOINED_BYTES, send_whole
from tests.builders import settle, soon
from tests.gateway.frontends.http.connections import Connection

BODY = b'{"outputs":[]}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_a_whole_response_has_the_bytes_and_state_of_uvicorns(keep_alive: bool) -> None:
    whole, apart = Connection(), Connection()
    quick, full = whole.cycle(keep_alive=keep_alive), apart.cycle(keep_alive=keep_alive)
    await send_whole(quick, HEADERS, (BODY,))
    await full.send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await full.send({"type": "http.response.body", "body": BODY, "more_body": False})
    assert whole.written == apart.written
    assert len(whole.writes) == 1
    for connection, cycle in ((whole, quick), (apart, full)):
        assert (cycle.response_started, cycle.response_complete) == (True, True)
        assert cycle.message_event.is_set()
        assert (connection.answered, connection.closed) == (1, not keep_alive)


async def test_a_large_body_is_not_copied_and_goes_in_one_write(connection: Connection) -> None:
    parts = (b"short", b"x" * JOINED_BYTES)
    await send_whole(connection.cycle(), HEADERS, parts)
    [(_, *written)] = connection.writes
    assert [id(each) for each in written] == [id(each) for each in parts]


@pytest.mark.parametrize("size", [0, JOINED_BYTES - 5, JOINED_BYTES - 4])
async def test_a_body_may_have_many_parts(connection: Connection, size: int) -> None:
    await send_whole(connection.cycle(), HEADERS, (b"", b"short", memoryview(b"x" * size)))
    assert connection.written.endswith(b"\r\n\r\nshort" + b"x" * size)
    assert len(connection.writes) == 1


async def test_nothing_is_written_to_a_client_that_has_gone(connection: Connection) -> None:
    cycle = connection.cycle()
    cycle.disconnected = True
    await send_whole(cycle, HEADERS, (BODY,))
    assert connection.writes == []
    assert connection.answered == 0


@pytest.mark.parametrize("goes", [True, False])
async def test_a_write_waits_for_a_client_that_reads_nothing(
    connection: Connection, goes: bool
) -> None:
    cycle = connection.cycle()
    connection.flow.pause_writing()
    sending = asyncio.create_task(send_whole(cycle, HEADERS, (BODY,)))
    await settle()
    assert connection.writes == []
    cycle.disconnected = goes
    connection.flow.resume_writing()
    await soon(sending)
    assert bool(connection.writes) is not goes
