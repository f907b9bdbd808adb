"""Messages of a worker while the gateway does not read all of them."""

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from backends.python.worker.sluice_worker.connection import GatewayConnection
from backends.python.worker.sluice_worker.protocol import FrameSplitter, OutgoingSegments, ToGateway

WAIT_SECS = 20.0


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """WorkSocket, control and descriptors; the gateway's end first."""
    with ExitStack() as opened:
        made = [socket.socketpair() for _ in range(3)]
        for each in itertools.chain.from_iterable(made):
            opened.enter_context(each)
        yield made


def test_released_segments_are_sent_while_work_is_full(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    (work, _), (control, _), (descriptors, _) = pairs
    connection = GatewayConnection(*(theirs for _, theirs in pairs))
    flooding = threading.Thread(target=connection.send, args=([0], [bytes(4 << 20)]))
    flooding.start()
    assert work.recv(1)  # it is being sent, and more than the socket holds
    outgoing = OutgoingSegments(descriptors)
    number = outgoing.place(memoryview(bytes(1 << 16)))
    connection.incoming.view(number, 1 << 16)
    telling = threading.Thread(target=connection.send_released, daemon=True)
    telling.start()
    telling.join(WAIT_SECS)
    told = not telling.is_alive()
    received = control.recv(1 << 16) if told else b""
    work.settimeout(0.1)
    while flooding.is_alive():
        with suppress(TimeoutError):  # the thread may end after its last byte was read
            work.recv(1 << 20)
    assert told
    ((header, _),) = FrameSplitter().feed(received)
    assert json.loads(header) == [ToGateway.RELEASED, [number], []]
    outgoing.close()
    connection.incoming.close()
