"""Every disconnect ends its own request within a second, and no other."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.leaving import (
    IN_FLIGHT,
    PENDING,
    SMALL_BUFFER,
    WAYS,
    Moment,
    Question,
    Way,
    accepted,
    noticed,
)
from tests.raw import Connection, post
from tests.rpc import connected, infer_request, streaming
from tests.serving import Serving, held, wait_until

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

SEND_TIMEOUT_SECS = 1
NOTICED_SECS = 1
DROPPED_SECS = SEND_TIMEOUT_SECS + 3 * NOTICED_SECS
"""The buffers of the sockets are filled before, which takes a busy machine a second."""
FLAGS = (f"--send-timeout-secs={SEND_TIMEOUT_SECS}", "--http-first-response-secs=0.2")

STUCK = Question({"INPUT": "x"}, infer_request("stuck", INPUT="x"))
"""Never answered; a second one waits for the first."""

TICKING = {"text_input": "x", "n": 100_000, "delay_us": 10_000}
FLOODING = {"text_input": "x" * 10_000, "n": 100_000}


def ways(*moments: Moment) -> list[Way]:
    return [way for way in WAYS if way.moment in moments]


def repeated(body: dict[str, object]) -> Question:
    return Question(body, infer_request("repeat", **body))


@pytest.fixture(autouse=True)
def _good_request_afterwards(http: httpx.Client) -> Iterator[None]:
    yield
    answer = http.post("/v2/models/single/generate", json={"INPUT": "good"})
    assert answer.json()["OUTPUT"] == "good"


@contextmanager
def occupied(server: Serving, model: str) -> Iterator[Connection]:
    """A client that has the only instance of a model, for the length of the block."""
    with Connection(server.ports["http"]) as connection:
        with accepted(server, model):
            connection.ask(f"/v2/models/{model}/generate", {"INPUT": "occupant"})
        server.wait_metric(PENDING, model, 0)
        yield connection


@pytest.mark.parametrize("way", ways(Moment.BEFORE_THE_FIRST_ANSWER), ids=str)
def test_leaving_before_the_first_answer(server: Serving, way: Way) -> None:
    assert server.metric(IN_FLIGHT, "stuck") == 0
    with noticed(server, "stuck", NOTICED_SECS), way.leave(server, STUCK):
        server.wait_metric(IN_FLIGHT, "stuck", 0, NOTICED_SECS)


@pytest.mark.parametrize("way", ways(Moment.BEFORE_THE_FIRST_ANSWER), ids=str)
@pytest.mark.own_models("the queue")
def test_leaving_the_queue(server: Serving, way: Way) -> None:
    executed = server.metric("nv_inference_exec_count", "stuck")
    both = noticed(server, "stuck", NOTICED_SECS, canceled=2)
    with both, occupied(server, "stuck") as occupant:
        with noticed(server, "stuck", NOTICED_SECS), way.leave(server, STUCK):
            server.wait_metric(IN_FLIGHT, "stuck", 1, NOTICED_SECS)
        occupant.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            occupant.socket.recv(1)
        assert server.metric("nv_inference_exec_count", "stuck") == executed
    server.wait_metric("nv_inference_exec_count", "stuck", executed + 1, NOTICED_SECS)


@pytest.mark.parametrize("way", ways(Moment.BETWEEN_ANSWERS), ids=str)
def test_leaving_between_answers(server: Serving, way: Way) -> None:
    with noticed(server, "repeat", NOTICED_SECS), way.leave(server, repeated(TICKING)):
        server.wait_metric(IN_FLIGHT, "repeat", 0, NOTICED_SECS)


@pytest.mark.parametrize("way", ways(Moment.WHEN_BUFFERS_ARE_FULL), ids=str)
def test_a_client_that_takes_nothing_counts_as_gone(server: Serving, way: Way) -> None:
    began = time.monotonic()
    with noticed(server, "repeat", NOTICED_SECS), way.leave(server, repeated(FLOODING)):
        server.wait_metric(IN_FLIGHT, "repeat", 0, DROPPED_SECS)
    assert time.monotonic() - began >= SEND_TIMEOUT_SECS


def test_a_client_that_takes_nothing_holds_back_its_model_and_is_dropped(server: Serving) -> None:
    way = next(way for way in ways(Moment.WHEN_BUFFERS_ARE_FULL) if "generate" in way.name)
    open_before, before = server.open_files, server.resident_bytes
    with way.leave(server, repeated(FLOODING)):
        server.wait_metric(IN_FLIGHT, "repeat", 0, DROPPED_SECS)
        assert server.resident_bytes - before < 50_000_000
        wait_until(lambda: server.open_files <= open_before, "the connection is closed")


def floats(server: Serving, count: int) -> Connection:
    """A client that has asked for `count` bytes from a binary infer, and reads none."""
    connection = Connection(server.ports["http"], receive_buffer=SMALL_BUFFER)
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "INPUT",
                    "datatype": "FP32",
                    "shape": [count // 4],
                    "parameters": {"binary_data_size": count},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    announced = f"Inference-Header-Content-Length: {len(header)}"
    connection.send(post("/v2/models/echo_fp32/infer", header + bytes(count), announced))
    return connection


def test_a_client_that_takes_nothing_of_a_whole_answer_is_dropped(server: Serving) -> None:
    open_before, before = server.open_files, server.resident_bytes
    answered = server.metric("nv_inference_request_success", "echo_fp32")
    with floats(server, 50_000_000):
        server.wait_metric("nv_inference_request_success", "echo_fp32", answered + 1)
        wait_until(
            lambda: server.open_files <= open_before, "the connection is closed", DROPPED_SECS
        )
        wait_until(lambda: server.resident_bytes - before < 25_000_000, "the answer is forgotten")


def test_a_client_that_takes_little_by_little_gets_all(server: Serving) -> None:
    size, parts = 40_000_000, 20
    began = time.monotonic()
    with floats(server, size) as connection:
        head = connection.head()
        length = int(head.headers["content-length"])
        for part in range(parts):
            wait_until(
                lambda due=part * 1.5 * SEND_TIMEOUT_SECS / parts: time.monotonic() - began >= due,
                "it is time to read on",
            )
            assert len(connection.read(size // parts)) == size // parts
        assert len(connection.read(length - size)) == length - size
    assert time.monotonic() - began > SEND_TIMEOUT_SECS


def test_a_grpc_client_that_reads_nothing_gets_an_error_after_the_send_timeout(
    server: Serving,
) -> None:
    with connected(server.grpc) as stub, streaming(stub) as rpc:
        with accepted(server, "repeat"):
            rpc.ask(repeated(FLOODING).message)
        server.wait_metric(IN_FLIGHT, "repeat", 0, DROPPED_SECS)
        assert rpc.error() == ("CANCELLED", "the client stopped reading")


def test_a_request_behind_one_that_left_gets_its_turn(server: Serving, repository: Path) -> None:
    message = infer_request("taking_turns", INPUT="x")
    with connected(server.grpc) as stub:
        with held(repository, "taking_turns"):
            calls = []
            for _ in range(3):
                with accepted(server, "taking_turns"):
                    calls.append(stub.ModelInfer.future(message))
            calls[0].cancel()
            calls[1].cancel()
            server.wait_metric(IN_FLIGHT, "taking_turns", 1)
        assert calls[2].result(timeout=20).raw_output_contents == [b"\x01\x00\x00\x00x"]
    assert server.metric("nv_inference_request_success", "taking_turns") == 1


def test_a_client_that_left_does_not_disturb_the_others(server: Serving) -> None:
    body = {"text_input": "x", "n": 30, "delay_us": 60_000}  # longer than the others stay
    with Connection(server.ports["http"]) as bystander:
        with accepted(server, "repeat"):
            bystander.ask("/v2/models/repeat/generate_stream", body)
        for way in ways(Moment.BETWEEN_ANSWERS)[:2]:
            with way.leave(server, repeated(TICKING)):
                server.wait_metric(IN_FLIGHT, "repeat", 1, NOTICED_SECS)
        assert bystander.answer().body.count(b"data: ") == 30


def test_a_hundred_clients_leave_at_once(server: Serving) -> None:
    with noticed(server, "repeat", NOTICED_SECS, canceled=100):
        clients = [Connection(server.ports["http"]) for _ in range(100)]
        for client in clients:
            client.ask("/v2/models/repeat/generate_stream", TICKING)
        server.wait_metric(IN_FLIGHT, "repeat", 100)
        for client in clients:
            client.close()
