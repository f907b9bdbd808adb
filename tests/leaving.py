"""Every way in which a client can leave: one table, for models with and without an engine.

A way is a context manager: it asks, waits until the server has the request, and leaves; inside its
block the client has left, and the server is to notice.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc

from tests.raw import Connection, post
from tests.rpc import StreamRpc, connected, streaming
from tests.serving import WAIT_SECS, Serving, series, wait_until

IN_FLIGHT = "gateway_requests_in_flight"
PENDING = "nv_inference_pending_request_count"
FAILURES = "nv_inference_request_failure"
SMALL_BUFFER = 4096
SHORT_SECS = 2.0

HTTP_PROCESS = """
import socket, sys
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.sendall(bytes.fromhex(sys.argv[2]))
while client.recv(1):
    print("answered", flush=True)
"""
GRPC_PROCESS = """
import queue, sys, grpc
requests = queue.Queue()
requests.put(bytes.fromhex(sys.argv[2]))
channel = grpc.insecure_channel(sys.argv[1])
infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
for answer in infer(iter(requests.get, None)):
    print("answered", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a model, as the body of generate and as the message of gRPC."""

    body: Mapping[str, Any]
    message: Any

    @property
    def model(self) -> str:
        """The model that is asked."""
        name: str = self.message.model_name
        return name


class Moment(Enum):
    """The moment when a client leaves."""

    BEFORE_THE_FIRST_ANSWER = auto()
    BETWEEN_ANSWERS = auto()
    WHEN_BUFFERS_ARE_FULL = auto()


Leave = Callable[[Serving, Question], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to leave; `unary` ones are for models that are not decoupled."""

    name: str
    moment: Moment
    leave: Leave
    unary: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Account:
    """The server's metrics of the requests of one model."""

    in_flight: float
    pending: float
    canceled: float

    @classmethod
    def read(cls, server: Serving, model: str) -> "Account":
        """The account at this moment."""
        page = server.metrics()
        return cls(
            in_flight=page[series(IN_FLIGHT, model)],
            pending=page[series(PENDING, model)],
            canceled=page[series(FAILURES, model, reason="CANCELED")],
        )

    @property
    def is_idle(self) -> bool:
        """No request is left."""
        return not self.in_flight and not self.pending


@contextmanager
def noticed(server: Serving, model: str, within: float, canceled: int = 1) -> Iterator[None]:
    """In this block clients leave: soon after it nothing is left of their requests but a count."""
    before = Account.read(server, model)
    wanted = Account(before.in_flight, before.pending, before.canceled + canceled)
    yield
    text = f"{wanted} is what is left of a client that has gone"
    wait_until(lambda: Account.read(server, model) == wanted, text, within)


@contextmanager
def accepted(server: Serving, model: str) -> Iterator[None]:
    """In this block a request is made: after it the server has it."""
    before = server.metric(IN_FLIGHT, model)
    yield
    server.wait_metric(IN_FLIGHT, model, before + 1)


async def reached(server: Serving, model: str, in_flight: int, pending: int) -> None:
    """Wait until the model has these numbers of requests."""

    def is_so() -> bool:
        page = server.metrics()
        return (page[series(IN_FLIGHT, model)], page[series(PENDING, model)]) == (
            in_flight,
            pending,
        )

    await asyncio.to_thread(wait_until, is_so, f"{in_flight} in flight and {pending} pending")


def _over_http(
    endpoint: str,
    leave: Callable[[Connection], None],
    read: Callable[[Connection], Any] = lambda connection: None,
    receive_buffer: int = 0,
) -> Leave:
    @contextmanager
    def way(server: Serving, question: Question) -> Iterator[None]:
        with Connection(server.ports["http"], receive_buffer) as connection:
            with accepted(server, question.model):
                connection.ask(f"/v2/models/{question.model}/{endpoint}", question.body)
            read(connection)
            leave(connection)
            yield

    return way


def _over_stream(
    leave: Callable[[StreamRpc], None],
    read: Callable[[StreamRpc], Any] = lambda rpc: None,
    timeout: float = 6 * WAIT_SECS,
) -> Leave:
    @contextmanager
    def way(server: Serving, question: Question) -> Iterator[None]:
        with connected(server.grpc, ready=True) as stub, streaming(stub, timeout=timeout) as rpc:
            with accepted(server, question.model):
                rpc.ask(question.message)
            read(rpc)
            leave(rpc)
            yield

    return way


def _by_death(wire: str, read: bool) -> Leave:
    @contextmanager
    def way(server: Serving, question: Question) -> Iterator[None]:
        with accepted(server, question.model):
            process = subprocess.Popen(_command(wire, server, question), stdout=subprocess.PIPE)
        try:
            if read and process.stdout is not None:
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            yield
        finally:
            process.kill()
            process.communicate(timeout=WAIT_SECS)

    return way


def _command(wire: str, server: Serving, question: Question) -> list[str]:
    if wire == "grpc":
        request = question.message.SerializeToString().hex()
        return [sys.executable, "-c", GRPC_PROCESS, server.grpc, request]
    path = f"/v2/models/{question.model}/generate_stream"
    request = post(path, json.dumps(question.body).encode()).hex()
    return [sys.executable, "-c", HTTP_PROCESS, str(server.ports["http"]), request]


@contextmanager
def _cancel_unary(server: Serving, question: Question) -> Iterator[None]:
    with connected(server.grpc) as stub:
        with accepted(server, question.model):
            call = stub.ModelInfer.future(question.message)
        call.cancel()
        yield


@contextmanager
def _miss_unary_deadline(server: Serving, question: Question) -> Iterator[None]:
    with connected(server.grpc, ready=True) as stub:
        with accepted(server, question.model):
            call = stub.ModelInfer.future(question.message, timeout=SHORT_SECS)
        _expect_deadline(call)
        yield


@contextmanager
def _close_channel(server: Serving, question: Question) -> Iterator[None]:
    with connected(server.grpc) as stub:
        rpc = StreamRpc(stub)
        with accepted(server, question.model):
            rpc.ask(question.message)
        rpc.answer()
    rpc.half_close()
    yield


def _expect_deadline(call: Any) -> None:
    try:
        call.result(timeout=WAIT_SECS)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017 - a future's error
    else:
        raise AssertionError("the deadline was not noticed")


def _miss_deadline(rpc: StreamRpc) -> None:
    wait_until(lambda: rpc.ended, "the deadline ends the RPC")


def _half_close_and_cancel(rpc: StreamRpc) -> None:
    rpc.half_close()
    rpc.cancel()


def _stall(who: Connection | StreamRpc) -> None:
    """Stay, and read nothing more."""


def _stop_sending(connection: Connection) -> None:
    connection.socket.shutdown(1)


def _read_event(connection: Connection) -> None:
    connection.head()
    assert connection.chunk()


BEFORE, BETWEEN, FULL = Moment
WAYS = (
    Way("generate: connection closed", BEFORE, _over_http("generate", Connection.close)),
    Way("generate: connection reset", BEFORE, _over_http("generate", Connection.reset)),
    Way("generate: sending side closed", BEFORE, _over_http("generate", _stop_sending)),
    Way(
        "generate_stream: closed before the headers",
        BEFORE,
        _over_http("generate_stream", Connection.close),
    ),
    Way(
        "generate_stream: closed after the headers, before the first event",
        BEFORE,
        _over_http("generate_stream", Connection.close, Connection.head),
    ),
    Way(
        "generate_stream: closed between events",
        BETWEEN,
        _over_http("generate_stream", Connection.close, _read_event),
    ),
    Way(
        "generate_stream: reset between events",
        BETWEEN,
        _over_http("generate_stream", Connection.reset, _read_event),
    ),
    Way(
        "generate_stream: reader stops reading",
        FULL,
        _over_http("generate_stream", _stall, _read_event, SMALL_BUFFER),
    ),
    Way("generate_stream: process killed at first", BEFORE, _by_death("http", read=False)),
    Way("generate_stream: process killed", BETWEEN, _by_death("http", read=True)),
    Way("ModelInfer: cancelled", BEFORE, _cancel_unary, unary=True),
    Way("ModelInfer: deadline", BEFORE, _miss_unary_deadline, unary=True),
    Way("ModelStreamInfer: cancelled at first", BEFORE, _over_stream(StreamRpc.cancel)),
    Way("ModelStreamInfer: cancelled", BETWEEN, _over_stream(StreamRpc.cancel, StreamRpc.answer)),
    Way(
        "ModelStreamInfer: deadline at first",
        BEFORE,
        _over_stream(_miss_deadline, timeout=SHORT_SECS),
    ),
    Way(
        "ModelStreamInfer: deadline",
        BETWEEN,
        _over_stream(_miss_deadline, StreamRpc.answer, SHORT_SECS),
    ),
    Way(
        "ModelStreamInfer: half-closed, then cancelled",
        BEFORE,
        _over_stream(_half_close_and_cancel),
    ),
    Way("ModelStreamInfer: channel closed", BETWEEN, _close_channel),
    Way("ModelStreamInfer: reader stops reading", FULL, _over_stream(_stall, StreamRpc.answer)),
    Way("ModelStreamInfer: process killed at first", BEFORE, _by_death("grpc", read=False)),
    Way("ModelStreamInfer: process killed", BETWEEN, _by_death("grpc", read=True)),
)
"""Leaving a stream before its headers or its first event needs a model that takes its time."""
