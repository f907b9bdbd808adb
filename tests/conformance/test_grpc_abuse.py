"""Clients that do harm to the gRPC port: each is dropped, and its neighbour is served.

The numbers are small; ABUSE_SCALE=50 in the environment makes them what is named in the README.
"""

import os
import random
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import pytest
from hyperframe.frame import SettingsFrame

from tests.conformance import abuses
from tests.conformance.abuses import BEGIN, OPEN, flood, frame, once, opened
from tests.conformance.neighbour import Neighbour, neighbour
from tests.http2 import PREFACE, Connection, message, request
from tests.raw import wait_taken
from tests.serving import Serving, wait_until

FLAGS = ("--grpc-transport=hyper",)
SCALE = int(os.environ.get("ABUSE_SCALE", "1"))
MIB = 1 << 20
P99_SECS = 0.5
"""The time that a neighbour may wait; on an idle machine it waits a fiftieth, on any scale."""

MEMORY_BYTES = 64 * MIB
FILES_WITHIN_SECS = 30.0
PROTOCOL_ERROR, FLOW_CONTROL, FRAME_SIZE, COMPRESSION, CALM = 1, 3, 6, 9, 11
UNEXPECTED = ("Traceback", "ERROR", "CRITICAL", "unexpectedly", "never retrieved")


@pytest.fixture(scope="module")
def bystander(server: Serving) -> Iterator[Neighbour]:
    """The neighbour of every client in this module."""
    with neighbour(server.grpc) as found:
        yield found


@pytest.fixture(autouse=True)
def _harmless(server: Serving, bystander: Neighbour) -> Iterator[None]:
    """In every test the neighbour is served, and after it the server holds nothing."""
    bystander.served()
    files, lines, memory = server.open_files, len(server.log), server.resident_bytes
    yield
    served = bystander.served()
    assert served.errors == []
    assert served.answers > 0
    assert served.p99_secs < P99_SECS
    assert server.process.poll() is None
    assert server.resident_bytes - memory < MEMORY_BYTES
    told = [line for line in server.log[lines:] if any(word in line for word in UNEXPECTED)]
    assert told == []
    wait_until(lambda: server.open_files <= files, "connections are forgotten", FILES_WITHIN_SECS)


@pytest.fixture
def port(server: Serving) -> int:
    """The place to do harm."""
    return server.ports["grpc"]


def times(full: int) -> int:
    """A number on the full scale, or a fiftieth of it by default."""
    return full * SCALE // 50


def test_streams_that_are_reset_at_once_end_the_connection(port: int) -> None:
    met = once(port, abuses.rapid_resets(times(100_000)))
    assert (met.ended, met.goaway) == (True, CALM)


def test_twenty_connections_of_such_streams_are_ended(port: int) -> None:
    data = abuses.rapid_resets(times(100_000))
    with ThreadPoolExecutor(20) as clients:
        found = list(clients.map(partial(once, port), [data] * 20))
    assert all(met.ended for met in found)


ENDING: Sequence[tuple[str, Callable[[], bytes], int]] = [
    ("empty CONTINUATION", lambda: abuses.continuations(times(1_000_000)), CALM),
    ("CONTINUATION that ends", lambda: abuses.continuations(times(1_000_000), ends=True), CALM),
    ("CONTINUATION of 1,000 bytes", lambda: abuses.continuations(times(100_000), 1000), CALM),
    ("header bombs", lambda: abuses.header_bombs(times(5000), 12_000), CALM),
    ("16 MiB of headers", lambda: abuses.large_headers(16 * MIB), CALM),
    ("empty DATA", lambda: abuses.empty_data(times(1_000_000)), CALM),
    ("DATA of padding", lambda: abuses.empty_data(times(200_000), 200), CALM),
    ("DATA with padding of none", lambda: abuses.empty_data(times(200_000), 0), CALM),
    (
        "PING",
        lambda: abuses.repeated(frame(abuses.PING, payload=b"12345678"), times(1_000_000)),
        CALM,
    ),
    ("window overflow", lambda: BEGIN + abuses.window_update(2**31 - 1) * 2, FLOW_CONTROL),
    ("window update of 0", lambda: BEGIN + abuses.window_update(0), PROTOCOL_ERROR),
]


@pytest.mark.parametrize(
    ("data", "code"), [each[1:] for each in ENDING], ids=[e[0] for e in ENDING]
)
def test_what_only_does_harm_ends_the_connection(
    port: int, data: Callable[[], bytes], code: int
) -> None:
    met = once(port, data())
    assert (met.ended, met.goaway) == (True, code)


BORNE: Sequence[tuple[str, Callable[[], bytes]]] = [
    (
        "SETTINGS",
        lambda: abuses.repeated(abuses.setting(abuses.INITIAL_WINDOW, 65535), times(10**6)),
    ),
    (
        "SETTINGS of a table of 4 GiB",
        lambda: abuses.repeated(abuses.setting(1, 2**32 - 1), times(10**6)),
    ),
    ("WINDOW_UPDATE", lambda: abuses.repeated(abuses.window_update(1), times(10**6))),
    (
        "WINDOW_UPDATE of a stream",
        lambda: abuses.repeated(abuses.window_update(1, 1), times(10**6)),
    ),
    ("PRIORITY", lambda: abuses.priorities(times(10**6))),
    ("unknown frames", lambda: abuses.repeated(frame(77, 0xFF, 1, b"x"), times(10**6))),
    ("GOAWAY", lambda: abuses.repeated(frame(abuses.GOAWAY, payload=bytes(8)), times(10**6))),
    ("no such method", lambda: abuses.requests(times(200_000), abuses.head(path="/x/y"))),
    ("no gRPC", lambda: abuses.requests(times(200_000), abuses.head((":method", "GET")))),
]


@pytest.mark.parametrize("reads", [True, False], ids=["who reads", "who does not read"])
@pytest.mark.parametrize("data", [each[1] for each in BORNE], ids=[each[0] for each in BORNE])
def test_a_flood_of_what_is_allowed_takes_no_memory_and_its_turn_only(
    port: int, data: Callable[[], bytes], reads: bool
) -> None:
    met = once(port, data(), reads=reads)
    assert not met.ended
    assert met.sent > 0


def test_the_server_stops_reading_a_client_that_does_not_read(port: int) -> None:
    data = abuses.repeated(abuses.setting(abuses.INITIAL_WINDOW, 65535), 1_000_000)
    with Connection(port, receive_buffer=4096) as connection:
        met = flood(connection.socket, data, reads=False)
        assert met.held
        assert met.sent < len(data)


@pytest.mark.parametrize(
    "data",
    [
        abuses.large_headers(68_000),
        *(abuses.indexed_headers(times) for times in (16, 20, 60, 70, 200)),
        *(abuses.coded_header(size) for size in (66_000, 80_000, 140_000)),
    ],
)
def test_headers_beyond_the_limit_fail_their_rpc_only(port: int, data: bytes) -> None:
    """Those of few bytes on the wire are repeated, or in Huffman's code."""
    with Connection(port) as connection:
        connection.send(data, frame(abuses.HEADERS, 5, 3, abuses.HEAD))
        found = connection.answer(1)
        assert found.client_status == "RESOURCE_EXHAUSTED"
        assert found.grpc_message == "the metadata are larger than the limit of 32768 bytes"
        assert connection.answer(3).grpc_status not in (None, found.grpc_status)


def test_headers_that_begin_in_the_read_of_a_message_have_the_same_limit(port: int) -> None:
    with Connection(port) as connection:
        for data in abuses.coded_header_behind_data(110_000):
            connection.send(data)
            wait_taken(connection.socket)
        assert connection.answer(3).client_status == "RESOURCE_EXHAUSTED"


def test_clients_learn_the_limit_of_headers(port: int) -> None:
    """Those that heed it send no more: more than seven frames would end the connection."""
    with Connection(port).begin() as connection:
        settings = next(each for each in connection.frames() if isinstance(each, SettingsFrame))
        assert settings.settings[SettingsFrame.MAX_HEADER_LIST_SIZE] == 64 << 10


@pytest.mark.parametrize("data", [abuses.indexed_headers(14), abuses.coded_header(32_000)])
def test_headers_within_the_limit_are_taken(port: int, data: bytes) -> None:
    with Connection(port) as connection:
        asked = message(abuses.infer("sixteen", 64))
        connection.send(data, frame(abuses.DATA, abuses.END_STREAM, 1, asked))
        assert connection.answer(1).grpc_status == 0


def test_trailers_beyond_the_limit_reset_their_stream_only(port: int) -> None:
    with Connection(port) as connection:
        connection.send(abuses.large_trailers(68_000))
        assert connection.answer(1).reset == CALM
        assert is_served(connection, 3)


def test_a_window_that_overflows_resets_its_stream_only(port: int) -> None:
    with Connection(port) as connection:
        connection.send(BEGIN + OPEN + abuses.window_update(2**31 - 1, 1))
        assert connection.answer(1).reset == FLOW_CONTROL
        assert is_served(connection, 3)


def is_served(connection: Connection, stream: int) -> bool:
    """Whether a small request is answered on this connection."""
    asked = message(abuses.infer("sixteen", 64))
    connection.send(
        frame(abuses.HEADERS, abuses.END_HEADERS, stream, abuses.HEAD),
        frame(abuses.DATA, abuses.END_STREAM, stream, asked),
    )
    return connection.answer(stream).grpc_status == 0


WRONG: Sequence[tuple[str, bytes, int]] = [
    ("a frame above the maximum", OPEN + frame(abuses.DATA, 0, 1, bytes(2 * MIB)), FRAME_SIZE),
    ("an even stream", frame(abuses.HEADERS, 4, 2, abuses.HEAD), PROTOCOL_ERROR),
    ("a stream that was passed over", frame(1, 4, 5, abuses.HEAD) + OPEN, PROTOCOL_ERROR),
    ("DATA of no stream", frame(abuses.DATA, 0, 7, b"x"), PROTOCOL_ERROR),
    ("RST_STREAM of no stream", frame(abuses.RESET, 0, 7, bytes(4)), PROTOCOL_ERROR),
    ("HEADERS of the connection", frame(abuses.HEADERS, 4, 0, abuses.HEAD), PROTOCOL_ERROR),
    ("DATA of the connection", frame(abuses.DATA, 0, 0, b"x"), PROTOCOL_ERROR),
    ("PING of a stream", frame(abuses.PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    ("SETTINGS of a stream", frame(abuses.SETTINGS, 0, 1), PROTOCOL_ERROR),
    ("CONTINUATION of nothing", frame(abuses.CONTINUATION, 4, 1, abuses.HEAD), PROTOCOL_ERROR),
    ("PUSH_PROMISE of a client", frame(abuses.PUSH, 4, 1, bytes(4) + abuses.HEAD), PROTOCOL_ERROR),
]


@pytest.mark.parametrize(("data", "code"), [each[1:] for each in WRONG], ids=[e[0] for e in WRONG])
def test_frames_that_are_wrong_end_the_connection(port: int, data: bytes, code: int) -> None:
    met = once(port, BEGIN + data)
    assert (met.ended, met.goaway) == (True, code)


def client_hello() -> bytes:
    """The first bytes of a client of TLS."""
    said = ssl.MemoryBIO()
    session = ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), said, server_hostname="localhost"
    )
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return said.read()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n12345",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n",
        client_hello(),
        PREFACE[:-1] + b"x",
        bytes(1000),
    ],
    ids=["GET", "POST", "h2c", "TLS", "nearly a preface", "zeros"],
)
def test_what_is_no_http_2_is_cut_off(port: int, data: bytes) -> None:
    assert once(port, data).ended


@pytest.mark.parametrize("start", [b"", PREFACE, BEGIN, BEGIN + OPEN])
def test_random_bytes_do_no_harm(port: int, start: bytes) -> None:
    source = random.Random(len(start))
    for _ in range(times(10_000)):
        with opened(port, start) as client, suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(source.randbytes(source.randrange(1, 2000)))
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                """The server says what it has to say, and closes the connection."""


@pytest.mark.parametrize("cut", [1, 12, 24, 30, 33, 40, len(BEGIN + OPEN) + 5, -1])
def test_a_connection_that_ends_within_a_frame_is_forgotten(port: int, cut: int) -> None:
    data = BEGIN + OPEN + frame(abuses.DATA, 0, 1, bytes(100))
    with opened(port, data[:cut]) as client:
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):
            """The server says what it has to say, and closes the connection."""


@pytest.mark.parametrize("first", [b"", PREFACE[:12], BEGIN, BEGIN + OPEN])
def test_thousands_of_idle_connections_are_borne(
    server: Serving, port: int, bystander: Neighbour, first: bytes
) -> None:
    count, before = times(2000), server.open_files
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(opened(port, first))
        wait_until(lambda: server.open_files >= before + count, "all are there")
        assert bystander.served().errors == []


def test_a_byte_at_a_time_is_read(port: int) -> None:
    asked = frame(abuses.DATA, 1, 1, message(abuses.infer("sixteen", 64)))
    with Connection(port) as connection:
        for byte in BEGIN + OPEN + asked:
            connection.send(bytes([byte]))
        assert connection.answer(1).grpc_status == 0


def test_a_deadline_of_a_nanosecond_ends_its_request_only(port: int) -> None:
    with Connection(port).begin() as connection:
        for stream, more in ((1, [("grpc-timeout", "1n")]), (3, [])):
            asked = message(abuses.infer("sixteen", 64))
            head = connection.headers(stream, request(abuses.INFER, *more))
            connection.send(head, frame(abuses.DATA, abuses.END_STREAM, stream, asked))
            met = connection.answer(stream)
        assert met.grpc_status == 0


def test_a_client_that_says_goodbye_gets_what_it_has_asked_for(port: int) -> None:
    asked = frame(abuses.DATA, abuses.END_STREAM, 1, message(abuses.infer("sixteen", 64)))
    met = once(port, BEGIN + OPEN + frame(abuses.GOAWAY, payload=bytes(8)) + asked)
    assert (met.ended, met.goaway) == (True, 0)
    assert met.kinds[-4:] == [abuses.HEADERS, abuses.DATA, abuses.HEADERS, abuses.GOAWAY]


@pytest.mark.parametrize("size", [2**32 - 1, 2**31])
def test_a_message_that_announces_too_much_is_refused_at_once(port: int, size: int) -> None:
    with Connection(port) as connection:
        connection.send(abuses.announced(times(1000), size, 0))
        for number in range(times(1000)):
            assert connection.answer(2 * number + 1).grpc_status == 8
        assert is_served(connection, 2 * times(1000) + 1)


def test_of_messages_that_announce_much_only_what_came_is_held(server: Serving, port: int) -> None:
    before = server.resident_bytes
    with opened(port) as client:
        met = flood(client, abuses.announced(times(1000), 2**31 - 1, 16384), reads=False)
        assert server.resident_bytes - before < 2 * met.sent + MEMORY_BYTES


def test_unread_answers_block_only_their_own_client(
    server: Serving, port: int, bystander: Neighbour
) -> None:
    size, count, before = 16 * 1024, times(1000), server.resident_bytes
    asked = abuses.asking(count, abuses.infer("echo_fp32", size))
    with opened(port) as client:
        flood(client, asked)
        assert server.resident_bytes - before < 4 * size * count + MEMORY_BYTES
        assert bystander.served().errors == []
