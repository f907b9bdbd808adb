"""Clients of diverted streams of the real engine that disconnect at each event."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.e2e.conftest import MAX_RUNNING
from tests.e2e.doors import DOORS, message
from tests.e2e.figures import (
    A_FEW_TOKENS,
    DROPPED_SECS,
    IN_FLIGHT,
    WASTED,
    changes,
    diverted,
    wait_at_rest,
)
from tests.e2e.llama import ENDLESS, Llama
from tests.leaving import noticed
from tests.raw import Connection
from tests.rpc import StreamRpc, connected
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

EVENTS = (0, 1, 2, 5)
"""The numbers of events that clients read before they disconnect; none has the headers."""


def test_a_client_may_disconnect_at_each_event(server: Serving, llama: Llama) -> None:
    """One client of each door closes its connection after each number of events, one resets it."""
    before, clients = diverted(server), len(EVENTS) * 2 * (len(DOORS) + 1)
    with changes(server) as change:
        with noticed(server, "llama", DROPPED_SECS, canceled=clients):
            for events in EVENTS:
                leave_after(server, events)
        wait_at_rest(server)
    llama.expect_answer()
    assert change["nv_inference_request_failure"] == clients
    assert 0 <= change[WASTED] <= clients * A_FEW_TOKENS
    assert diverted(server) - before > clients


def leave_after(server: Serving, events: int) -> None:
    """Have clients of every door, as many as the engine runs at once, leave after these events."""
    with ExitStack() as stack:
        leaves: list[Callable[[], None]] = []
        asked = [(door, way) for door in DOORS for way in (Connection.close, Connection.reset)]
        for door, way in asked:
            client = stack.enter_context(Connection(server.ports["http"]))
            client.ask(door.path, door.body(**ENDLESS))
            leaves.append(lambda client=client, way=way: leave(client, way, events))
        for _ in range(2):
            rpc = StreamRpc(stack.enter_context(connected(server.grpc)))
            rpc.ask(message(**ENDLESS))
            leaves.append(lambda rpc=rpc: leave_rpc(rpc, events))
        assert len(leaves) == MAX_RUNNING
        server.wait_metric(IN_FLIGHT, "llama", MAX_RUNNING)
        for each in leaves:
            each()
        server.wait_metric(IN_FLIGHT, "llama", 0)


def leave(client: Connection, way: Callable[[Connection], None], events: int) -> None:
    """Disconnect after this number of events."""
    if events:
        client.head()
    for _ in range(events):
        assert client.chunk()
    way(client)


def leave_rpc(rpc: StreamRpc, events: int) -> None:
    """Cancel after this number of messages."""
    for _ in range(events):
        assert not rpc.answer().error_message
    rpc.cancel()
