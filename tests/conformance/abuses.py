"""Abuses of a server by a client of HTTP/2, in bytes: each in any number."""

import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from hpack import Encoder
from tritonclient.grpc import service_pb2

from tests.http2 import PREFACE, request
from tests.serving import WAIT_SECS

INFER = "/inference.GRPCInferenceService/ModelInfer"
DATA, HEADERS, PRIORITY, RESET, SETTINGS = 0, 1, 2, 3, 4
PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
TABLE_SIZE, INITIAL_WINDOW = 1, 4
CANCEL = struct.pack(">L", 8)
FRAME_BYTES = 16384
"""The bytes that a frame may have without asking."""

STALL_SECS = 1.0
"""A server that takes nothing for so long does not read any more."""


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """A frame, whether or not it is allowed."""
    head = struct.pack(">BHBBL", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream)
    return head + payload


def setting(number: int, value: int) -> bytes:
    """A SETTINGS frame with one setting."""
    return frame(SETTINGS, payload=struct.pack(">HL", number, value))


def head(*more: tuple[str, str], path: str = INFER) -> bytes:
    """The header block of a request, which needs no table (RFC 7541, 6.2.2)."""
    return b"".join(field(name, value) for name, value in request(path, *more))


def field(name: str, value: str | bytes, kind: bytes = b"\x00") -> bytes:
    """One header; with the kind 0x40 it goes into the table."""
    text = value.encode() if isinstance(value, str) else value
    return kind + _sized(name.encode()) + _sized(text)


def _sized(text: bytes) -> bytes:
    """A string with its length, an integer of seven bits and more (RFC 7541, 5.1)."""
    size, prefix = len(text), b""
    if size < 127:
        return bytes([size]) + text
    prefix, size = b"\x7f", size - 127
    while size >= 128:
        prefix, size = prefix + bytes([size % 128 + 128]), size // 128
    return prefix + bytes([size]) + text


def infer(model: str, size: int) -> bytes:
    """The message that asks a model of FP32 with `size` bytes."""
    found = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(size)])
    found.inputs.add(name="INPUT", datatype="FP32", shape=[size // 4])
    return bytes(found.SerializeToString())


BEGIN = PREFACE + frame(SETTINGS)
HEAD = head()
OPEN = frame(HEADERS, END_HEADERS, 1, HEAD)
"""An RPC on stream 1, of which nothing follows."""


def rapid_resets(count: int) -> bytes:
    """Streams that are opened and reset at once (CVE-2023-44487)."""
    return _streams(
        count,
        lambda id_: frame(HEADERS, END_HEADERS, id_, HEAD) + frame(RESET, 0, id_, CANCEL),
    )


def continuations(count: int, size: int = 0, *, ends: bool = False) -> bytes:
    """A header block in `count` CONTINUATION frames and one of HEADERS (CVE-2024-27316)."""
    block = field("x", b"y" * size) if size else b""
    last = frame(CONTINUATION, END_HEADERS, 1) if ends else b""
    return BEGIN + frame(HEADERS, 0, 1, HEAD) + frame(CONTINUATION, 0, 1, block) * count + last


def header_bombs(count: int, times: int) -> bytes:
    """A header of 4,000 bytes, which each of `count` requests repeats `times` times in a byte."""
    table = field("a", b"b" * 4000, b"\x40")
    return _streams(
        count,
        lambda id_: frame(
            HEADERS, END_HEADERS, id_, HEAD + (table if id_ == 1 else b"") + b"\xbe" * times
        ),
    )


def large_headers(size: int) -> bytes:
    """A request with `size` bytes of headers, in frames of a usual size."""
    return BEGIN + _block(HEAD + _fields(size), 0)


def indexed_headers(times: int) -> bytes:
    """A request with a header of 4,000 bytes, and with it again in a byte each."""
    return BEGIN + _block(HEAD + field("a", b"b" * 4000, b"\x40") + b"\xbe" * times, 0)


def coded_header(size: int) -> bytes:
    """A request with a header of `size` characters, of five bits each in Huffman's code."""
    return BEGIN + _block(HEAD + Encoder().encode([("tracestate", "0" * size)]), 0)


def coded_header_behind_data(size: int) -> Iterator[bytes]:
    """The same on stream 3, in reads of which one has the end of a message and most of it."""
    coded = HEAD + Encoder().encode([("tracestate", "0" * size)])
    data = frame(DATA, 0, 1, struct.pack(">BL", 0, 1 << 20) + bytes(40_000))
    sent = BEGIN + OPEN + data + frame(HEADERS, END_HEADERS, 3, coded)
    ends = [len(BEGIN + OPEN), *(len(BEGIN + OPEN) + each for each in (16384, 32768, 98304))]
    for begin, end in pairwise((0, *ends, len(sent))):
        yield sent[begin:end]


def large_trailers(size: int) -> bytes:
    """A request that ends with `size` bytes of trailers."""
    return BEGIN + OPEN + _block(_fields(size), END_STREAM)


def _fields(size: int) -> bytes:
    return b"".join(field(f"x-{number}", b"v" * 1000) for number in range(size // 1000))


def _block(block: bytes, first_flag: int) -> bytes:
    pieces = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    kinds = [HEADERS] + [CONTINUATION] * (len(pieces) - 1)
    flags = [0] * (len(pieces) - 1) + [END_HEADERS]
    flags[0] |= first_flag
    return b"".join(
        frame(kind, flag, 1, piece) for kind, flag, piece in zip(kinds, flags, pieces, strict=True)
    )


def empty_data(count: int, padding: int | None = None) -> bytes:
    """DATA with nothing in it but padding."""
    if padding is None:
        return BEGIN + OPEN + frame(DATA, 0, 1) * count
    return BEGIN + OPEN + frame(DATA, PADDED, 1, bytes([padding]) + bytes(padding)) * count


def repeated(each: bytes, count: int) -> bytes:
    """The same frame after an RPC has begun."""
    return BEGIN + OPEN + each * count


def window_update(increment: int, stream: int = 0) -> bytes:
    """More window."""
    return frame(WINDOW, 0, stream, struct.pack(">L", increment))


def priorities(count: int) -> bytes:
    """Priorities of streams that there are not yet."""
    return _streams(count, lambda id_: frame(PRIORITY, 0, id_, struct.pack(">LB", 0, 16)))


def requests(count: int, block: bytes) -> bytes:
    """Requests without a body."""
    return _streams(count, lambda id_: frame(HEADERS, END_HEADERS | END_STREAM, id_, block))


def announced(count: int, size: int, sent: int) -> bytes:
    """RPCs that send only `sent` bytes of a message of `size` bytes, in turn."""
    opened = _streams(
        count,
        lambda id_: (
            frame(HEADERS, END_HEADERS, id_, HEAD)
            + frame(DATA, 0, id_, struct.pack(">BL", 0, size))
        ),
    )
    piece = bytes(min(sent, FRAME_BYTES))
    turn = b"".join(frame(DATA, 0, 2 * number + 1, piece) for number in range(count))
    return opened + turn * (sent // FRAME_BYTES or 1)


def asking(count: int, message: bytes) -> bytes:
    """Whole RPCs, to be answered into a window of 0."""
    framed = struct.pack(">BL", 0, len(message)) + message
    pieces = [framed[at : at + FRAME_BYTES] for at in range(0, len(framed), FRAME_BYTES)]

    def each(id_: int) -> bytes:
        data = [frame(DATA, 0, id_, piece) for piece in pieces]
        return frame(HEADERS, END_HEADERS, id_, HEAD) + b"".join(data) + frame(DATA, 1, id_)

    return PREFACE + setting(INITIAL_WINDOW, 0) + _streams(count, each).removeprefix(BEGIN)


@dataclass
class Met:
    """The server's behaviour to a client: the bytes that it took, and those that it sent."""

    sent: int = 0
    received: bytes = b""
    ended: bool = False
    """The server closed the connection."""
    held: bool = False
    """The server did not read any more."""

    @property
    def goaway(self) -> int | None:
        """The error code of the last GOAWAY."""
        codes = [payload[4:8] for kind, payload in self._frames() if kind == GOAWAY]
        return int.from_bytes(codes[-1]) if codes else None

    @property
    def kinds(self) -> list[int]:
        """The frames that came."""
        return [kind for kind, _ in self._frames()]

    @property
    def resets(self) -> list[int]:
        """The error codes of the streams that the server reset."""
        return [int.from_bytes(payload) for kind, payload in self._frames() if kind == RESET]

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        at, data = 0, self.received
        while at + 9 <= len(data):
            end = at + 9 + int.from_bytes(data[at : at + 3])
            yield data[at + 3], data[at + 9 : end]
            at = end


def flood(connection: socket.socket, data: bytes, *, reads: bool = True) -> Met:
    """Send as fast as the server takes it, until it ends the connection or stops reading."""
    met, view = Met(), memoryview(data)
    connection.setblocking(False)
    try:
        while met.sent < len(view) and not (met.ended or met.held):
            _exchange(connection, met, view, reads=reads)
        while reads and not met.ended and select.select([connection], [], [], STALL_SECS)[0]:
            _receive(connection, met)
    except (ConnectionResetError, BrokenPipeError):
        # What the server said before it ended the connection has come, and may not be read yet.
        with suppress(OSError):
            while not met.ended:
                _receive(connection, met)
        met.ended = True
    return met


def once(port: int, data: bytes, *, reads: bool = True) -> Met:
    """A flood on a connection of its own."""
    with opened(port) as connection:
        return flood(connection, data, reads=reads)


def opened(port: int, first: bytes = b"") -> socket.socket:
    """A connection on which this was sent."""
    found = socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.sendall(first)
    return found


def _exchange(connection: socket.socket, met: Met, view: memoryview, *, reads: bool) -> None:
    began = time.monotonic()
    reading = [connection] if reads else []
    readable, writable, _ = select.select(reading, [connection], [], STALL_SECS)
    met.held = not (readable or writable) and time.monotonic() - began >= STALL_SECS
    if readable:
        _receive(connection, met)
    if writable:
        met.sent += connection.send(view[met.sent : met.sent + (1 << 16)])


def _receive(connection: socket.socket, met: Met) -> None:
    data = connection.recv(1 << 20)
    met.received += data
    met.ended = not data


def _streams(count: int, each: Callable[[int], bytes]) -> bytes:
    return BEGIN + b"".join(each(2 * number + 1) for number in range(count))
