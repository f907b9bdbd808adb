"""Messages of a worker while the gateway does not read all of them."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any

import pytest

from backends.python.worker.sluice_worker.connection import GatewayConnection, encode, parsed
from backends.python.worker.sluice_worker.protocol import (
    FrameSplitter,
    OutgoingSegments,
    ToGateway,
    ToWorker,
    frame,
)
from backends.python.worker.sluice_worker.work import GatewayCalls, WorkSocket
from tests.serving import wait_until

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


def sent(work: socket.socket) -> list[int]:
    """The kinds of the messages that one read finds."""
    work.settimeout(WAIT_SECS)
    return [json.loads(header)[0] for header, _ in FrameSplitter().feed(work.recv(1 << 16))]


def test_gathered_messages_leave_together_and_those_of_other_threads_at_once(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    work = pairs[0][0]
    connection = GatewayConnection(*(theirs for _, theirs in pairs))
    with connection.gathered():
        connection.send([1], [b"a"])
        other = threading.Thread(target=connection.send, args=([2],))
        other.start()
        other.join(WAIT_SECS)
        connection.send([3])
        assert sent(work) == [2]
    assert sent(work) == [1, 3]
    connection.send([4])
    assert sent(work) == [4]


def test_gathered_messages_are_sent_if_the_block_fails(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    connection = GatewayConnection(*(theirs for _, theirs in pairs))
    with suppress(ZeroDivisionError), connection.gathered():
        connection.send([1])
        raise ZeroDivisionError
    assert sent(pairs[0][0]) == [1]


def test_work_is_drained_only_while_its_reader_waits_for_more(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    gateway = pairs[0][0]
    connection = GatewayConnection(*(theirs for _, theirs in pairs))
    work = WorkSocket(connection, GatewayCalls(connection))
    work.watch()
    assert not work.drained
    found: list[int] = []
    handled = threading.Event()

    def read() -> None:
        while (message := work.next()) is not None:
            found.append(message[0][0])
            handled.wait(WAIT_SECS)

    reading = threading.Thread(target=read)
    reading.start()
    wait_until(lambda: work.drained, "the reader waits")
    gateway.sendall(frame(json.dumps([ToWorker.FINALIZE]).encode()))
    wait_until(lambda: bool(found), "a message has arrived")
    assert not work.drained
    handled.set()
    wait_until(lambda: work.drained, "the message has been handled")
    gateway.shutdown(socket.SHUT_WR)
    reading.join(WAIT_SECS)
    assert not reading.is_alive()


def test_work_that_is_not_watched_is_read_by_one_system_call(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewayConnection, "wait_work", lambda _: pytest.fail("waited"))
    connection = GatewayConnection(*(theirs for _, theirs in pairs))
    work = WorkSocket(connection, GatewayCalls(connection))
    pairs[0][0].sendall(frame(json.dumps([ToWorker.FINALIZE]).encode()))
    assert work.next() is not None
    assert not work.drained


def test_a_worker_polls_for_answers_and_not_for_requests(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = pairs[0][0]
    connection = GatewayConnection(*(theirs for _, theirs in pairs))
    calls = GatewayCalls(connection)
    work = WorkSocket(connection, calls)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)  # each message comes soon
    polls = 0

    def receive_work_now() -> bytes:
        nonlocal polls
        polls += 1
        return connection.receive_work()

    def send(*header: Any) -> None:
        gateway.sendall(frame(encode(header).encode()))

    monkeypatch.setattr(connection, "receive_work_now", receive_work_now)
    arrived: SimpleQueue[int] = SimpleQueue()
    found = []
    for number in range(3):
        send(ToWorker.EXECUTE, number, [[1]])
        assert work.next() == ([ToWorker.EXECUTE, number, [[1]]], b"")
        call = calls.begin(lambda _, final: arrived.put(final))
        send(ToWorker.INFERRED, call, None, True)
        assert work.wait(arrived)
        found.append(polls)
    assert found == [0, 1, 2]


def test_headers_are_the_text_of_the_json_library() -> None:
    header = [5, None, "O\u00e9\ud800\n", 1.5, (1, 2), {"a": [True, False]}, 1 << 80]
    text = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode(header)
    assert encode(header) == text
    assert encode([float("nan"), float("inf")]) == "[NaN,Infinity]"
    assert parsed(text.encode(errors="surrogatepass")) == json.loads(text)
