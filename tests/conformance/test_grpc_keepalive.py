"""The life of a connection of gRPC: the pings of both ends, and its age."""

import errno
import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, PingFrame, SettingsFrame

from tests.conformance.models import REPEAT, identity
from tests.http2 import PREFACE, Answer, Connection, message, request
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
ENHANCE_YOUR_CALM = 11
PERMITTED = "--grpc-keepalive-permit-without-calls=true"
STRIKES = "--grpc-http2-max-ping-strikes"
INTERVAL = "--grpc-http2-min-recv-ping-interval-without-data"
PINGS = "--grpc-http2-max-pings-without-data"
SOME_PINGS = 20
SOON_SECS = 5.0
LONG = {"text_input": "x", "n": 100_000, "delay_us": 20_000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "single", identity("BYTES", "1"))
    write_model(folder, "repeat", REPEAT)
    return folder


@pytest.fixture(params=["hyper", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    return f"--grpc-transport={request.param}"


@contextmanager
def kept(models: Path, *flags: str) -> Iterator[Serving]:
    with serving(models, *flags) as server:
        yield server
    assert server.process.returncode == 0
    assert "Traceback" not in server.text


class Client(Connection):
    """A client that pings, and asks for the same answer again and again."""

    def __init__(self, server: Serving) -> None:
        super().__init__(server.ports["grpc"])
        self._streams = itertools.count(1, 2)
        self.begin()
        self.until(SettingsFrame)
        self.send(SettingsFrame(0, flags=("ACK",)))

    def until(self, kind: type[Frame]) -> Any:
        """The next frame of a kind; those before it are passed over, pings are answered."""
        while not isinstance(frame := self.receive(), kind):
            assert frame is not None, "the connection ended"
            self.acknowledge(frame)
        return frame

    def acknowledge(self, frame: Frame) -> None:
        """Answer a ping; other frames need no answer."""
        if isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            self.send(PingFrame(0, frame.opaque_data, flags=("ACK",)))

    def pinged(self, times: int, within: float = WAIT_SECS) -> int:
        """The number of answered pings of the server before it has been silent for that long."""
        found = 0
        with suppress(TimeoutError):
            while found < times:
                frame = self.receive(within)
                assert frame is not None, "the connection ended"
                found += isinstance(frame, PingFrame)
                self.acknowledge(frame)
        return found

    def ping(self, data: bytes = b"01234567") -> bool:
        """Whether a ping is answered; if not, the connection is being ended."""
        self.send(PingFrame(0, data))
        while not isinstance(frame := self.receive(), PingFrame) or "ACK" not in frame.flags:
            if frame is None or isinstance(frame, GoAwayFrame):
                self.last = frame
                return False
        return bool(frame.opaque_data == data)

    def ask(self) -> Answer:
        stream = next(self._streams)
        body = message(infer_request("single", INPUT="x").SerializeToString())
        self.send(self.headers(stream, request(INFER)))
        self.send(DataFrame(stream, body, flags=("END_STREAM",)))
        return self.answer(stream)

    def begin_stream(self) -> int:
        """A stream that has had an answer, and stays open."""
        stream = next(self._streams)
        body = message(infer_request("single", INPUT="x").SerializeToString())
        self.send(self.headers(stream, request(STREAM)), DataFrame(stream, body))
        self.until(DataFrame)
        return stream


def refuses(port: int) -> bool:
    """Whether a port refuses connections."""
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def left(client: Client) -> tuple[int, bytes]:
    """The reason with which the server ends the connection."""
    found = client.last if isinstance(client.last, GoAwayFrame) else None
    found = client.closed() or found
    assert found is not None
    return found.error_code, found.additional_data


def test_a_client_that_pings_too_often_gets_a_goaway_and_is_dropped(
    models: Path, transport: str
) -> None:
    with (
        kept(models, transport) as server,
        connected(server.grpc) as neighbour,
        streaming(neighbour) as rpc,
    ):
        for begin in (Client.ask, Client.begin_stream):
            with Client(server) as client:
                begin(client)
                answers = [True]
                while answers[-1]:
                    answers.append(client.ping())
                # One that is in time, and two strikes; some sort of data may go along with it.
                assert 4 <= len(answers[1:]) <= 6
                assert left(client) == (ENHANCE_YOUR_CALM, b"too_many_pings")
        rpc.ask(infer_request("single", "a", INPUT="x"))
        assert rpc.answer().infer_response.id == "a"


def test_pings_are_no_strikes_if_there_was_data_in_between(models: Path, transport: str) -> None:
    with kept(models, transport) as server, Client(server) as client:
        for _ in range(SOME_PINGS):
            assert client.ask().grpc_status == 0
            assert client.ping()
            assert client.ping()


def test_data_on_a_stream_counts_as_well(models: Path, transport: str) -> None:
    with kept(models, transport) as server, Client(server) as client:
        stream = client.begin_stream()
        body = message(infer_request("single", INPUT="x").SerializeToString())
        for _ in range(SOME_PINGS):
            client.send(DataFrame(stream, body))
            client.until(DataFrame)
            assert client.ping()
            assert client.ping()


@pytest.mark.parametrize("flags", [(f"{STRIKES}=0",), (PERMITTED, f"{INTERVAL}=0")])
def test_any_number_of_pings_is_answered_if_that_is_allowed(
    models: Path, transport: str, flags: tuple[str, ...]
) -> None:
    with kept(models, transport, *flags) as server, Client(server) as client:
        for number in range(SOME_PINGS):
            assert client.ping(number.to_bytes(8))


def test_an_interval_is_for_connections_with_an_rpc(models: Path, transport: str) -> None:
    with kept(models, transport, f"{INTERVAL}=0") as server:
        with Client(server) as client:
            client.begin_stream()
            assert all(client.ping() for _ in range(SOME_PINGS))
        with Client(server) as idle:
            assert not all(idle.ping() for _ in range(SOME_PINGS))
            assert left(idle) == (ENHANCE_YOUR_CALM, b"too_many_pings")


def test_a_client_that_answers_no_ping_is_cut_off(models: Path, transport: str) -> None:
    flags = ("--grpc-keepalive-time=100", "--grpc-keepalive-timeout=300", f"{PINGS}=0")
    with (
        kept(models, transport, *flags) as server,
        connected(server.grpc) as neighbour,
        streaming(neighbour) as rpc,
        Client(server) as client,
    ):
        rpc.ask(infer_request("repeat", "a", **LONG))
        client.begin_stream()
        assert client.pinged(3) == 3
        began = time.monotonic()
        client.closed()
        assert time.monotonic() - began < SOON_SECS
        # A client that answers is pinged, too, and stays connected.
        for _ in range(30):
            assert rpc.answer().infer_response.id == "a"


def test_only_clients_with_an_rpc_are_pinged_unless_others_are_permitted(
    models: Path, transport: str
) -> None:
    flags = ("--grpc-keepalive-time=50", f"{PINGS}=0")
    with kept(models, transport, *flags) as server, Client(server) as client:
        assert client.pinged(1, within=0.5) == 0
    with kept(models, transport, PERMITTED, *flags) as server, Client(server) as client:
        assert client.pinged(5) == 5


def test_an_idle_client_gets_at_most_the_configured_number_of_pings(models: Path) -> None:
    flags = (PERMITTED, "--grpc-keepalive-time=50", f"{PINGS}=3")
    with kept(models, "--grpc-transport=hyper", *flags) as server, Client(server) as client:
        assert client.pinged(3) == 3
        assert client.pinged(1, within=0.5) == 0
        assert client.ask().grpc_status == 0
        assert client.pinged(3) == 3
        # One more may go out between the parts of the answer.
        assert client.pinged(2, within=0.5) in (0, 1)


def test_an_old_connection_is_ended_once_its_rpcs_have(models: Path, transport: str) -> None:
    with kept(models, transport, "--grpc-max-connection-age=500") as server:
        with Client(server) as client:
            stream = client.begin_stream()
            away = client.until(GoAwayFrame)
            assert away.error_code == 0
            client.send(DataFrame(stream, b"", flags=("END_STREAM",)))
            ended = []
            for frame in client.frames():
                ended.append(frame.stream_id)
                client.acknowledge(frame)
            assert stream in ended
        with connected(server.grpc) as stub, streaming(stub) as rpc:
            rpc.ask(infer_request("repeat", "a", text_input="x", n=60, delay_us=20_000))
            assert len(rpc.rest()) == 60
            answer = stub.ModelInfer(infer_request("single", INPUT="x"), timeout=WAIT_SECS)
            assert answer.raw_output_contents


def test_an_old_connection_is_cut_off_when_its_grace_is_over(models: Path, transport: str) -> None:
    flags = ("--grpc-max-connection-age=300", "--grpc-max-connection-age-grace=300")
    with kept(models, transport, *flags) as server, connected(server.grpc) as stub:
        with streaming(stub) as rpc:
            rpc.ask(infer_request("repeat", "a", **LONG))
            assert rpc.error()[0] in {"UNAVAILABLE", "CANCELLED"}
        server.wait_metric("gateway_requests_in_flight", "repeat", 0)
        with suppress(grpc.RpcError):  # a connection may be old by now
            stub.ModelInfer(infer_request("single", INPUT="x"), timeout=WAIT_SECS)
        answer = stub.ModelInfer(
            infer_request("single", INPUT="x"), timeout=WAIT_SECS, wait_for_ready=True
        )
        assert answer.raw_output_contents


def test_shutdown_waits_for_rpcs_and_for_no_idle_connection(models: Path, transport: str) -> None:
    with (
        kept(models, transport) as server,
        connected(server.grpc) as stub,
        streaming(stub) as rpc,
        Connection(server.ports["grpc"]),
        Connection(server.ports["grpc"]) as half,
        Client(server) as idle,
    ):
        half.send(PREFACE[:10])
        rpc.ask(infer_request("repeat", "a", text_input="x", n=20, delay_us=50_000))
        assert rpc.answer().infer_response.id == "a"
        server.begin_stop()
        assert idle.until(GoAwayFrame).error_code == 0
        wait_until(lambda: refuses(server.ports["grpc"]), "nobody is let in")
        assert len(rpc.until_exit()) == 19
        began = time.monotonic()
        assert server.wait_ended() == 0
        assert time.monotonic() - began < SOON_SECS
        idle.closed()
        half.closed()
