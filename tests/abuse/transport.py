"""Cases of the transport: slow and many connections, bombs, smuggled requests, floods, TLS."""

import gzip
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial

from hyperframe.frame import DataFrame

from tests.abuse.scene import Scene
from tests.children import frontends_of
from tests.conformance import abuses
from tests.conformance.abuses import BEGIN, END_HEADERS, HEAD, Met, flood, frame, once, opened
from tests.http2 import Connection as Http2
from tests.http2 import message, request
from tests.raw import Connection, get
from tests.serving import WAIT_SECS, wait_until

GENERATE = b"POST /v2/models/repeat/generate HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"text_input":"x","n":1}'
INFER = "/v2/models/echo_fp32/infer"
MEBIBYTE = 1 << 20
CALM, RESOURCE_EXHAUSTED = 11, 8
PIECE = 16384

SLOW = 20
PAUSE_SECS = 0.5
PACE_SECS = 10.0


def slow_bodies(scene: Scene) -> None:
    """Bodies of two bytes in a second, whose pauses are all within the limit of pauses."""
    began = time.monotonic()
    with ExitStack() as stack:
        crowd = [stack.enter_context(Connection(scene.http)) for _ in range(SLOW)]
        for each in crowd:
            each.send(GENERATE + b"Content-Length: 100000\r\n\r\n")
        while not select.select([crowd[0].socket], [], [], PAUSE_SECS)[0]:
            assert time.monotonic() - began < PACE_SECS + WAIT_SECS
            for each in crowd:
                each.send_as_taken(b" ")
        assert time.monotonic() - began > PACE_SECS - PAUSE_SECS
        for each in crowd:
            scene.refused(scene.answer(each), (408,), "fewer than 1024 bytes in a second")


PER_ADDRESS = 8
"""The limit of the server."""
CROWD = 50


def crowds_of_an_address(scene: Scene, address: str) -> None:
    """More connections of another machine's address than an address may have."""
    for port, first in ((scene.http, get("/v2")), (scene.grpc, BEGIN)):
        with ExitStack() as stack:
            crowd = [
                stack.enter_context(socket.create_connection((address, port), WAIT_SECS))
                for _ in range(CROWD)
            ]
            served = sum(_is_answered(each, first) for each in crowd)
            assert served == PER_ADDRESS * max(1, len(frontends_of(scene.server.process.pid)))
        wait_until(partial(_is_served, address, port, first), "the address is served again")


def _is_served(address: str, port: int, first: bytes) -> bool:
    with socket.create_connection((address, port), WAIT_SECS) as client:
        return _is_answered(client, first)


def _is_answered(client: socket.socket, first: bytes) -> bool:
    with suppress(ConnectionResetError, BrokenPipeError):
        client.sendall(first)
        return bool(client.recv(1))
    return False


BOMB_BYTES = 80 * MEBIBYTE
BOMBS = 4
GZIP = ("grpc-encoding", "gzip")


@cache
def bomb() -> bytes:
    """Zeros, a thousandth of their size."""
    return gzip.compress(bytes(BOMB_BYTES), compresslevel=1)


def bombs_over_http(scene: Scene) -> None:
    """Small bodies that decompress to more than a body may have."""
    for _ in range(BOMBS):
        answer = scene.ask(INFER, bomb(), "Content-Encoding: gzip")
        scene.refused(answer, (400,), "exceeds the maximum allowed value of 67108864 bytes")


def bombs_over_grpc(scene: Scene) -> None:
    """Small messages that decompress to 80 MiB."""
    framed = message(bomb(), 1)
    with Http2(scene.grpc).begin() as connection:
        for stream in range(1, 2 * BOMBS, 2):
            connection.send(connection.headers(stream, request(abuses.INFER, GZIP)))
            for at in range(0, len(framed), PIECE):
                connection.send(DataFrame(stream, framed[at : at + PIECE]))
            answer = connection.answer(stream)
            assert answer.grpc_status == RESOURCE_EXHAUSTED
            assert "expected at most 100 for each byte" in scene.check(answer.grpc_message)


BEHIND = get("/v2/models/behind")
"""The request behind another one, which an intermediary may take for a part of its body."""


def _posted(*headers: bytes) -> bytes:
    return GENERATE + b"\r\n".join(headers) + b"\r\n\r\n"


def _of(length: bytes) -> bytes:
    return b"Content-Length: " + length


LENGTH = _of(b"%d" % len(BODY))
CHUNKED = b"Transfer-Encoding: chunked"


def _chunks(size: bytes = b"18", end: bytes = b"\r\n") -> bytes:
    return size + b"\r\n" + BODY + end + b"0\r\n\r\n"


REFUSED: Mapping[str, bytes] = {
    "length and chunks": _posted(_of(b"4"), CHUNKED) + _chunks(),
    "chunks and length": _posted(CHUNKED, _of(b"4")) + _chunks(),
    "two equal lengths": _posted(LENGTH, LENGTH) + BODY,
    "two lengths": _posted(LENGTH, _of(b"0")) + BODY,
    "a list of lengths": _posted(_of(b"24, 24")) + BODY,
    "a length with a sign": _posted(_of(b"+24")) + BODY,
    "a hexadecimal length": _posted(_of(b"0x18")) + BODY,
    "a length with a blank in it": _posted(_of(b"2 4")) + BODY,
    "no length": _posted(_of(b"")) + BODY,
    "chunks before another coding": _posted(CHUNKED + b", identity") + _chunks(),
    "another coding alone": _posted(b"Transfer-Encoding: identity") + _chunks(),
    "an unknown coding": _posted(b"Transfer-Encoding: xchunked") + _chunks(),
    "a coding behind a control": _posted(b"Transfer-Encoding: \x0bchunked") + _chunks(),
    "two codings": _posted(CHUNKED, b"Transfer-Encoding: identity") + _chunks(),
    "chunks of chunks": _posted(CHUNKED + b", chunked") + _chunks(),
    "a quoted coding": _posted(b'Transfer-Encoding: "chunked"') + _chunks(),
    "a folded header": _posted(b"X: a\r\n Content-Length: 5", LENGTH) + BODY,
    "a folded coding": _posted(b"Transfer-Encoding:\r\n chunked") + _chunks(),
    "a line that ends with LF": _posted(b"X: y\n" + LENGTH) + BODY,
    "a line that ends with CR": _posted(b"X: y\rContent-Length: 3", LENGTH) + BODY,
    "lines that end with LF": _posted(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "a blank before the colon": _posted(b"Content-Length : 24") + BODY,
    "a blank before a header": _posted(b" Content-Length: 3", LENGTH) + BODY,
    "a NUL in a name": _posted(b"X\0Y: a", LENGTH) + BODY,
    "a header without a name": _posted(b": a", LENGTH) + BODY,
    "an upgrade behind LF": _posted(b"X: y\nUpgrade: h2c", LENGTH) + BODY,
    "a size with a sign": _posted(CHUNKED) + _chunks(b"+18"),
    "a size with 0x": _posted(CHUNKED) + _chunks(b"0x18"),
    "a size of 17 digits": _posted(CHUNKED) + _chunks(b"1" + b"0" * 14 + b"18"),
    "a size with a blank": _posted(CHUNKED) + _chunks(b"18 "),
    "a size before LF": _posted(CHUNKED) + _chunks().replace(b"18\r\n", b"18\n"),
    "a chunk before LF": _posted(CHUNKED) + _chunks(end=b"\n"),
    "an extension with LF": _posted(CHUNKED) + _chunks(b"18;a\n"),
    "no size": _posted(CHUNKED) + _chunks(b""),
    "a size that is too small": _posted(CHUNKED) + _chunks(b"10"),
    "a length in the trailers": _posted(CHUNKED) + _chunks()[:-2] + LENGTH + b"\r\n\r\n",
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
ANSWERED: Mapping[str, bytes] = {
    "a length behind blanks": _posted(_of(b"24 \t")) + BODY,
    "a coding behind a tab": _posted(b"Transfer-Encoding:\tchunked") + _chunks(),
    "a coding in capitals": _posted(CHUNKED.upper()) + _chunks(),
    "a coding before chunks": _posted(b"Transfer-Encoding: identity, chunked") + _chunks(),
    "a size of zeros": _posted(CHUNKED) + _chunks(b"0" * 15 + b"18"),
    "an extension": _posted(CHUNKED) + _chunks(b'18;a="b"'),
    "a body of GET": get("/v2", f"Content-Length: {len(BEHIND)}") + BEHIND,
    "chunks of GET": get("/v2", CHUNKED.decode()) + _chunks(),
    "an upgrade": _posted(b"Upgrade: h2c", b"Connection: upgrade", LENGTH) + BODY,
}


def smuggled_requests(scene: Scene) -> None:
    """Framings that intermediaries read otherwise: refused and cut off, or read as one request."""
    for name, data in REFUSED.items():
        with Connection(scene.http) as connection:
            connection.send(data + BEHIND)
            answer = connection.answer()
            assert (name, answer.status) == (name, 400)
            assert connection.ended, name
            assert "behind" not in scene.check(answer.body.decode()), name
    for name, data in ANSWERED.items():
        with Connection(scene.http) as connection:
            connection.send(data + BEHIND)
            assert (name, scene.answer(connection).status) == (name, 200)
            assert (name, scene.answer(connection).status) == (name, 404)
            connection.send(get("/v2/health/live"))
            assert (name, scene.answer(connection).status) == (name, 200)


CALMED = (CALM, None)
"""The GOAWAY of a flood, which the reset of the connection may overtake."""
OPEN = frame(abuses.HEADERS, END_HEADERS, 1, HEAD)
STREAMS = 3000
MOST_STREAMS = 10_000
RESET_BY_SERVER: Mapping[str, Callable[[int], bytes]] = {
    "a window that overflows": lambda stream: abuses.window_update(2**31 - 1, stream),
    "a stream that depends on itself": lambda stream: frame(
        abuses.PRIORITY, 0, stream, struct.pack(">LB", stream, 16)
    ),
    "a second head": lambda stream: frame(abuses.HEADERS, END_HEADERS, stream, HEAD),
}
ENDED_BY_SERVER: Mapping[str, Callable[[int], bytes]] = {
    "a window update of 0": lambda stream: abuses.window_update(0, stream),
    "a RST_STREAM of five bytes": lambda stream: frame(abuses.RESET, 0, stream, bytes(5)),
    "DATA behind the end": lambda stream: frame(abuses.DATA, 1, stream) * 2,
}


def streams(count: int, after: Callable[[int], bytes]) -> bytes:
    """RPCs, each followed by frames."""
    return BEGIN + b"".join(
        frame(abuses.HEADERS, END_HEADERS, stream, HEAD) + after(stream)
        for stream in range(1, 2 * count, 2)
    )


def until_end(port: int, data: bytes) -> Met:
    """A flood on a connection of its own, which the server has to end."""
    began, sent, received = time.monotonic(), 0, b""
    with opened(port) as connection:
        while True:
            met = flood(connection, data[sent:])
            sent, received = sent + met.sent, received + met.received
            if met.ended:
                return Met(sent, received, ended=True)
            assert time.monotonic() - began < WAIT_SECS, "the connection is not ended"


def resets_made_by_the_server(scene: Scene) -> None:
    """Frames for which the server resets a stream (MadeYouReset, CVE-2025-8671)."""
    for name, after in RESET_BY_SERVER.items():
        met = until_end(scene.grpc, streams(STREAMS, after))
        assert met.goaway in CALMED, (name, met.goaway)
        assert len(met.resets) <= 1024, name
    for after in ENDED_BY_SERVER.values():
        until_end(scene.grpc, streams(STREAMS, after))


def ten_thousand_streams(scene: Scene) -> None:
    """RPCs of one connection that are all open."""
    met = until_end(scene.grpc, streams(MOST_STREAMS, lambda stream: b""))
    assert met.goaway in CALMED, met.goaway


FLOODS: Mapping[str, Callable[[], bytes]] = {
    "rapid resets": lambda: abuses.rapid_resets(1000),
    "CONTINUATION": lambda: abuses.continuations(20_000),
    "header bombs": lambda: abuses.header_bombs(20, 12_000),
    "headers": lambda: abuses.large_headers(4 * MEBIBYTE),
    "empty DATA": lambda: abuses.empty_data(20_000),
    "PING": lambda: abuses.repeated(frame(abuses.PING, payload=b"12345678"), 20_000),
    "SETTINGS": lambda: abuses.repeated(abuses.setting(abuses.INITIAL_WINDOW, 65535), 20_000),
    "WINDOW_UPDATE": lambda: abuses.repeated(abuses.window_update(1), 20_000),
    "streams": lambda: streams(2000, lambda stream: b""),
    **{
        name: partial(streams, 500, after)
        for name, after in {**RESET_BY_SERVER, **ENDED_BY_SERVER}.items()
    },
}


def floods(scene: Scene) -> None:
    """Each flood of HTTP/2, from clients that read and from those that do not."""
    for number, data in enumerate(FLOODS.values()):
        once(scene.grpc, data(), reads=bool(number % 3))


HANDSHAKES = 100


def client_hello() -> bytes:
    """The first bytes of a client of TLS."""
    said = ssl.MemoryBIO()
    session = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), said, server_hostname="x")
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return said.read()


def half_handshakes(scene: Scene) -> None:
    """Handshakes that stop after the first message, cut ones, and clients without TLS."""
    hello = client_hello()
    firsts: Sequence[bytes] = (b"", hello[:20], hello, BEGIN + OPEN, get("/v2"), bytes(300))
    with ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(("127.0.0.1", scene.grpc), WAIT_SECS))
            for _ in range(HANDSHAKES)
        ]
        for number, each in enumerate(crowd):
            with suppress(ConnectionResetError, BrokenPipeError):
                each.sendall(firsts[number % len(firsts)])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        client = socket.create_connection(("127.0.0.1", scene.grpc), WAIT_SECS)
        with context.wrap_socket(client) as session:
            assert session.selected_alpn_protocol() == "h2"
