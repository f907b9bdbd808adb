"""The ways in: how a client sends a request on each wire, reads the answer, and disconnects.

A client lives in the server's own loop and never blocks it: it sends all at once, and takes what
has come when its descriptor is readable.
"""

import asyncio
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from socket import SO_LINGER, SOL_SOCKET, create_connection, socket
from typing import Any

from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from tritonclient.grpc import service_pb2

from gateway.errors import InferenceError
from gateway.in_process.server import ModelHandle
from tests import http2
from tests.raw import post
from tests.sweep import questions
from tests.sweep.questions import EMPTY_FINAL, FINAL, Outcome, Question

SERVICE = "/inference.GRPCInferenceService"
LARGE = 1 << 24
MESSAGE_HEAD_BYTES = 5
HEADERS = ("Connection: close", "Content-Type: application/json")


class Leave(StrEnum):
    """The means by which a client disconnects."""

    CLOSE = "close"
    RESET = "reset"
    CANCEL = "cancel"


class Client(ABC):
    """One request; `answered` is set once all of its answer has come, or an end of it."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def outcome(self) -> Outcome:
        """The answer so far."""

    @abstractmethod
    def leave(self, how: Leave) -> None:
        """Disconnect, in one synchronous step; idempotent."""

    def _end(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)


class InProcess(Client):
    """A task that reads the responses."""

    def __init__(self, model: ModelHandle, question: Question) -> None:
        super().__init__()
        self._found = Outcome()
        self._task: asyncio.Task[None] | None = None
        try:
            self._responses = model.async_infer(**question.fields)
        except InferenceError as error:
            self._found = Outcome(error=error.message)
            self._end()
            return
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(self._drop)

    def outcome(self) -> Outcome:
        return self._found

    def leave(self, how: Leave) -> None:
        if self._task is None:
            return
        if how is Leave.CANCEL:
            self._task.cancel()
        else:
            self._responses.close()

    def _drop(self, task: "asyncio.Task[None]") -> None:
        """Close the responses with the task that owns them; it may never have begun."""
        self._responses.close()
        self._end()

    async def _read(self) -> None:
        try:
            async for response in self._responses:
                texts = questions.from_response(response).texts
                self._found = Outcome((*self._found.texts, *texts))
        except InferenceError as error:
            self._found = Outcome(self._found.texts, error.message)


class Wire(Client):
    """A connection of its own, which is closed after the answer."""

    def __init__(self, connection: socket) -> None:
        super().__init__()
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._readable)

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Bytes have come; none at the end of the connection."""

    def leave(self, how: Leave) -> None:
        if self._socket.fileno() < 0:
            return
        if how is Leave.RESET:
            self._socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._end()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except OSError:
            data = b""
        self._take(data)
        if self.answered.done() or not data:
            self.leave(Leave.CLOSE)


class HttpClient(Wire):
    """One HTTP/1.1 request on a connection that the server closes."""

    def __init__(self, port: int, request: bytes, decode: Callable[[bytes], Outcome]) -> None:
        self._received = b""
        self._decode = decode
        connection = create_connection(("127.0.0.1", port))
        super().__init__(connection)
        connection.sendall(request)
        connection.setblocking(False)

    def outcome(self) -> Outcome:
        head, _, body = self._received.partition(b"\r\n\r\n")
        if not body:
            return Outcome(error=f"the connection ended: {head!r}")
        if b"transfer-encoding: chunked" in head.lower():
            if not body.endswith(b"0\r\n\r\n"):
                return Outcome(error=f"the answer was cut off: {body!r}")
            body = _unchunked(body)
        return self._decode(body)

    def _take(self, data: bytes) -> None:
        self._received += data


class GrpcClient(Wire):
    """One RPC on a connection of HTTP/2; with `stays` its sending side stays open."""

    def __init__(self, port: int, method: str, message: Any, *, stays: bool) -> None:
        self._messages: list[Outcome] = []
        self._received = b""
        self._wire = http2.Connection(port)
        self._answer = self._wire.known(1)
        self._read_bytes = 0
        self._final = False
        self._streams = method == "ModelStreamInfer"
        super().__init__(self._wire.socket)
        data = DataFrame(1, http2.message(message.SerializeToString()))
        if not stays:
            data.flags.add("END_STREAM")
        settings = {SettingsFrame.INITIAL_WINDOW_SIZE: LARGE}
        head = self._wire.headers(1, http2.request(f"{SERVICE}/{method}"))
        self._wire.send(http2.PREFACE, SettingsFrame(0, settings=settings), head)
        self._unsent = deque(_split(data))
        self._windows = {0: http2.DEFAULT_WINDOW, 1: http2.DEFAULT_WINDOW}
        self._initial_window = http2.DEFAULT_WINDOW
        self._send_within_windows()

    def _send_within_windows(self) -> None:
        """Send the frames that fit into the windows of the connection and of the stream."""
        while self._unsent and len(self._unsent[0].data) <= min(self._windows.values()):
            frame = self._unsent.popleft()
            self._windows = {each: size - len(frame.data) for each, size in self._windows.items()}
            self._wire.send(frame)

    def _widen(self, frame: WindowUpdateFrame | SettingsFrame) -> None:
        if isinstance(frame, WindowUpdateFrame):
            self._windows[frame.stream_id] += frame.window_increment
        elif (size := frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE)) is not None:
            self._windows[1] += size - self._initial_window
            self._initial_window = size
        self._send_within_windows()

    def outcome(self) -> Outcome:
        texts = tuple(text for each in self._messages for text in each.texts)
        errors = [each.error for each in self._messages if each.error]
        if not errors and self._answer.ended and self._answer.grpc_status != 0:
            errors = [self._answer.grpc_message or self._answer.client_status]
        if not errors and not self._answer.ended and not self._final:
            errors = ["the connection ended"]
        return Outcome(texts, "".join(errors))

    def leave(self, how: Leave) -> None:
        if how is Leave.CANCEL and self._socket.fileno() >= 0:
            self._wire.send(RstStreamFrame(1, error_code=http2.CANCEL))
        super().leave(Leave.CLOSE if how is Leave.CANCEL else how)

    def _take(self, data: bytes) -> None:
        self._received += data
        try:
            while (frame := self._next_frame()) is not None:
                self._take_frame(frame)
        except ConnectionError:
            self._end()

    def _next_frame(self) -> Frame | None:
        if len(self._received) < http2.HEAD_BYTES:
            return None
        frame, size = Frame.parse_frame_header(memoryview(self._received[: http2.HEAD_BYTES]))
        end = http2.HEAD_BYTES + size
        if len(self._received) < end:
            return None
        frame.parse_body(memoryview(self._received[http2.HEAD_BYTES : end]))
        self._received = self._received[end:]
        return frame

    def _take_frame(self, frame: Frame) -> None:
        self._wire.take(frame)
        if isinstance(frame, (WindowUpdateFrame, SettingsFrame)):
            self._widen(frame)
        if isinstance(frame, (DataFrame, HeadersFrame, RstStreamFrame)):
            self._read_messages()
        if self._answer.ended or self._final:
            self._end()

    def _read_messages(self) -> None:
        body = self._answer.body
        while len(body) - self._read_bytes >= MESSAGE_HEAD_BYTES:
            begin = self._read_bytes + MESSAGE_HEAD_BYTES
            end = begin + int.from_bytes(body[begin - 4 : begin])
            if len(body) < end:
                return
            self._read_bytes, data = end, body[begin:end]
            if not self._streams:
                message = service_pb2.ModelInferResponse.FromString(data)
                self._messages.append(questions.from_message(message))
                continue
            found = service_pb2.ModelStreamInferResponse.FromString(data)
            outcome = questions.from_message(found.infer_response)
            self._messages.append(Outcome(outcome.texts, found.error_message))
            flag = found.infer_response.parameters[FINAL].bool_param
            self._final = flag or bool(found.error_message)


@dataclass(frozen=True, slots=True)
class Way:
    """One way in: `options` are the server's, `ask` sends a request."""

    name: str
    options: Mapping[str, object]
    ask: Callable[[Mapping[str, int], Question], Client]
    leaves: tuple[Leave, ...] = (Leave.CLOSE, Leave.RESET)
    streams: bool = False
    openai: bool = False
    suffix: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.name, self.suffix]))


def _http(path: Callable[[Question], str], body: Callable[[Question], bytes], decode: Any) -> Any:
    def ask(ports: Mapping[str, int], question: Question) -> Client:
        request = post(path(question), body(question), *HEADERS)
        return HttpClient(ports["http"], request, decode)

    return ask


def _grpc(method: str, *, stays: bool = False) -> Any:
    def ask(ports: Mapping[str, int], question: Question) -> Client:
        message = question.message
        if method == "ModelStreamInfer":
            message.parameters[EMPTY_FINAL].bool_param = True
        return GrpcClient(ports["grpc"], method, message, stays=stays)

    return ask


def _generate_path(suffix: str) -> Callable[[Question], str]:
    return lambda question: f"/v2/models/{question.model}/{suffix}"


def _unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        found += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return found


def _split(frame: DataFrame) -> list[DataFrame]:
    """A frame in parts that every server takes."""
    parts = [frame.data[at : at + (1 << 14)] for at in range(0, len(frame.data), 1 << 14)]
    found = [DataFrame(frame.stream_id, part) for part in parts]
    found[-1].flags = frame.flags
    return found


INFER = _http(lambda q: q.infer_path, lambda q: q.infer, questions.from_infer)
GENERATE = _http(_generate_path("generate"), lambda q: q.generate, questions.from_generate)
EVENTS = _http(_generate_path("generate_stream"), lambda q: q.generate, questions.from_events)
CHAT = _http(
    lambda q: "/v1/chat/completions", lambda q: q.openai(stream=False), questions.from_openai
)
CHUNKS = _http(
    lambda q: "/v1/chat/completions", lambda q: q.openai(stream=True), questions.from_chunks
)
COMPLETIONS = _http(lambda q: "/v1/completions", lambda q: q.completions, questions.from_chunks)
UNARY, STREAM = _grpc("ModelInfer"), _grpc("ModelStreamInfer", stays=True)
HALF_CLOSED = _grpc("ModelStreamInfer")

LOCAL: Mapping[str, object] = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}
PORTS = {**LOCAL, "http_port": 0, "grpc_port": 0}
GRPCIO = {**PORTS, "grpc_transport": "grpcio"}
PROCESSES = {**PORTS, "frontends": 2}
EVERY = tuple(Leave)
IN_PROCESS = "in process"


def _ask_nothing(ports: Mapping[str, int], question: Question) -> Client:
    raise AssertionError("a request in process needs no port")


def _on_http(suffix: str, options: Mapping[str, object]) -> tuple[Way, ...]:
    return (
        Way("infer", options, INFER, suffix=suffix),
        Way("generate", options, GENERATE, suffix=suffix),
        Way("generate_stream", options, EVENTS, streams=True, suffix=suffix),
        Way("chat", options, CHAT, openai=True, suffix=suffix),
        Way("chat_stream", options, CHUNKS, streams=True, openai=True, suffix=suffix),
        Way("completions_stream", options, COMPLETIONS, streams=True, openai=True, suffix=suffix),
    )


def _on_grpc(suffix: str, options: Mapping[str, object]) -> tuple[Way, ...]:
    return (
        Way("ModelInfer", options, UNARY, EVERY, suffix=suffix),
        Way("ModelStreamInfer", options, STREAM, EVERY, streams=True, suffix=suffix),
        Way(
            "ModelStreamInfer, half-closed",
            options,
            HALF_CLOSED,
            EVERY,
            streams=True,
            suffix=suffix,
        ),
    )


SUFFIXES = ("", "grpcio", "frontends")
"""The servers: of this process alone, with the other transport of gRPC, with frontend processes."""
WAYS = (
    Way(IN_PROCESS, PORTS, _ask_nothing, (Leave.CLOSE, Leave.CANCEL), streams=True),
    *_on_http("", PORTS),
    *_on_grpc("", PORTS),
    *_on_grpc("grpcio", GRPCIO),
    *_on_http("frontends", PROCESSES),
    *_on_grpc("frontends", PROCESSES),
)
