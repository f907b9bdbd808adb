"""HTTP/2 in frames of a test's own making: what a client library would refuse to send, or hide."""

import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import unquote

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.serving import WAIT_SECS

DEFAULT_WINDOW = 65_535
"""The initial window of a connection and of its streams (RFC 9113, 6.9.2)."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
CANCEL = 8
"""The error code with which a client says that it does not want an answer any more."""

STATUS = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
    *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
    "UNAUTHENTICATED",
)
RESETS = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}
"""The meaning of the error codes of a reset; all others are INTERNAL."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclass
class Answer:
    """The content of one stream: its headers, its body, and its end."""

    head: Headers = ()
    body: bytes = b""
    trailers: Headers = ()
    reset: int | None = None
    """The error code that the server reset the stream with; None if it did not."""
    ended: bool = field(default=False, repr=False)
    """Nothing more comes on the stream."""

    @property
    def http_status(self) -> int:
        """The status of the head; 0 if there was no head."""
        return int(self.text(":status") or 0)

    @property
    def grpc_status(self) -> int | None:
        """The fields of the trailers, or of a head without trailers."""
        found = self.text("grpc-status")
        return None if found is None else int(found)

    @property
    def client_status(self) -> str:
        """The name of the status that a client of gRPC makes of it.

        Where the answer has none, gRPC says what is meant (HTTP2 Transport Mapping, Errors).
        """
        if self.grpc_status is not None:
            return STATUS[self.grpc_status]
        if self.reset is not None:
            return RESETS.get(self.reset, "INTERNAL")
        return "UNKNOWN" if self.head else "UNAVAILABLE"

    @property
    def grpc_message(self) -> str:
        """The text of the status, decoded."""
        return unquote(self.text("grpc-message") or "")

    @property
    def messages(self) -> list[bytes]:
        """The messages of the body, whose flags must be 0."""
        found, rest = [], self.body
        while rest:
            flag, size = struct.unpack_from(">BL", rest)
            assert flag == 0, "the answer is compressed"
            found.append(rest[5 : 5 + size])
            rest = rest[5 + size :]
        return found

    def text(self, name: str) -> str | None:
        """The last value of that name in the head and the trailers."""
        values = [value for each, value in (*self.head, *self.trailers) if each == name.encode()]
        return values[-1].decode("latin-1") if values else None


class Connection:
    """One connection to a port of this machine, with nothing sent but what the test sends.

    No wait takes longer than WAIT_SECS. Frames that come are acknowledged, and windows opened
    again, only by `answer`.
    """

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT_SECS)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder = Encoder()
        self._decoder = Decoder()
        self._decoder.max_allowed_table_size = 1 << 16
        self._received = b""
        self._block = b""
        self._ending = False
        self._answers: dict[int, Answer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, *parts: bytes | Frame) -> None:
        """Send bytes and frames as they are, in one write."""
        self.socket.sendall(
            b"".join(part if isinstance(part, bytes) else part.serialize() for part in parts)
        )

    def begin(self, **settings: int) -> Self:
        """Send the preface and SETTINGS: `INITIAL_WINDOW_SIZE=0` and such."""
        named = {getattr(SettingsFrame, name): value for name, value in settings.items()}
        self.send(PREFACE, SettingsFrame(0, settings=named))
        return self

    def headers(
        self, stream: int, fields: Iterable[tuple[str | bytes, str | bytes]], *flags: str
    ) -> HeadersFrame:
        """A HEADERS frame that is all of its block; say END_STREAM if nothing follows."""
        block = self.encoder.encode([(_bytes(name), _bytes(value)) for name, value in fields])
        return HeadersFrame(stream, block, flags=("END_HEADERS", *flags))

    def receive(self, within: float = WAIT_SECS) -> Frame | None:
        """The next frame; None at the end of the connection. TimeoutError if nothing comes."""
        head = self._exactly(HEAD_BYTES, within)
        if head is None:
            return None
        frame, size = Frame.parse_frame_header(memoryview(head))
        body = self._exactly(size, within)
        if body is None:
            return None
        frame.parse_body(memoryview(body))
        return frame

    def frames(self, within: float = WAIT_SECS) -> Iterator[Frame]:
        """Every frame to the end of the connection."""
        while (frame := self.receive(within)) is not None:
            yield frame

    def answer(self, stream: int, within: float = WAIT_SECS) -> Answer:
        """Read until a stream has ended, as a client would; ConnectionError if the connection ends.

        What comes for other streams meanwhile is kept for them.
        """
        found = self._answers.setdefault(stream, Answer())
        while not found.ended:
            self.take(self.receive(within))
        return found

    def head(self, stream: int, within: float = WAIT_SECS) -> Answer:
        """Read until the headers of a stream's answer are there; more may follow."""
        found = self._answers.setdefault(stream, Answer())
        while not found.head and not found.ended:
            self.take(self.receive(within))
        return found

    def known(self, stream: int) -> Answer:
        """The frames of a stream so far."""
        return self._answers.setdefault(stream, Answer())

    def take(self, frame: Frame | None) -> None:
        """Do what a client does with a frame."""
        if frame is None or isinstance(frame, GoAwayFrame):
            raise ConnectionError(f"the connection ended: {frame}")
        if isinstance(frame, (HeadersFrame, ContinuationFrame)):
            self._take_block(frame)
        elif isinstance(frame, DataFrame):
            self._take_data(frame)
        elif isinstance(frame, RstStreamFrame):
            found = self._answers.setdefault(frame.stream_id, Answer())
            found.reset, found.ended = frame.error_code, True
        elif isinstance(frame, (SettingsFrame, PingFrame)) and "ACK" not in frame.flags:
            self._acknowledge(frame)

    def closed(self, within: float = WAIT_SECS) -> GoAwayFrame | None:
        """Read to the end of the connection: the GOAWAY before it, if there was one."""
        last = None
        try:
            for frame in self.frames(within):
                last = frame if isinstance(frame, GoAwayFrame) else last
        except ConnectionResetError:
            pass
        return last

    def reset(self) -> None:
        """Leave without a goodbye: the server sees a connection reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Leave."""
        self.socket.close()

    def _take_block(self, frame: HeadersFrame | ContinuationFrame) -> None:
        self._block += frame.data
        self._ending = "END_STREAM" in frame.flags or self._ending
        if "END_HEADERS" not in frame.flags:
            return
        fields = [
            (_bytes(name), _bytes(value))
            for name, value in self._decoder.decode(self._block, raw=True)
        ]
        found = self._answers.setdefault(frame.stream_id, Answer())
        if found.head:
            found.trailers = fields
        else:
            found.head = fields
        found.ended, self._ending, self._block = self._ending, False, b""

    def _take_data(self, frame: DataFrame) -> None:
        found = self._answers.setdefault(frame.stream_id, Answer())
        found.body += frame.data
        found.ended = "END_STREAM" in frame.flags
        size = frame.flow_controlled_length
        if size:
            self.send(*(WindowUpdateFrame(each, size) for each in (0, frame.stream_id)))

    def _acknowledge(self, frame: SettingsFrame | PingFrame) -> None:
        told = frame.opaque_data if isinstance(frame, PingFrame) else b""
        mirrored = PingFrame(0, told) if isinstance(frame, PingFrame) else SettingsFrame(0)
        mirrored.flags.add("ACK")
        self.send(mirrored)

    def _exactly(self, count: int, within: float) -> bytes | None:
        self.socket.settimeout(within)
        while len(self._received) < count:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._received += data
        found, self._received = self._received[:count], self._received[count:]
        return found


def message(data: bytes, flag: int = 0) -> bytes:
    """A gRPC message with the five bytes before it."""
    return struct.pack(">BL", flag, len(data)) + data


def request(
    path: str, *more: tuple[str, str | bytes], without: Sequence[str] = ()
) -> list[tuple[str, str | bytes]]:
    """The headers of a gRPC request, as a client sends them; those of the same name take over."""
    usual = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    for name in (*without, *(name for name, _ in more)):
        usual.pop(name, None)
    return sorted([*usual.items(), *more], key=lambda pair: not pair[0].startswith(":"))


def _bytes(text: str | bytes) -> bytes:
    return text.encode("latin-1") if isinstance(text, str) else text
