"""The largest requests of each route block no other client: probes are answered meanwhile."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.conformance.neighbour import neighbour
from tests.serving import WAIT_SECS, Serving, serving

pytestmark = pytest.mark.quiet

LIMIT_SECS = 0.1
"""The time for which the event loop may be blocked."""
BUSY_SECS = 3.0
SMALL = 60 << 10
PAUSE_SECS = 0.01
LARGEST = 60 << 20
"""Bytes of JSON, below the default of --http-max-input-size."""
FLAGS = ("--model-control-mode=explicit", "--load-model=*")
ANSWER_SECS = 8 * WAIT_SECS
TRANSPORTS = ("hyper", "grpcio")


class Probes:
    """Health probes on a connection of their own; the worst of them since `begin`."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECS)
        self.worst_secs = 0.0

    def ask(self) -> None:
        """One probe."""
        began = time.perf_counter()
        self._connection.request("GET", "/v2/health/live")
        response = self._connection.getresponse()
        response.read()
        self.worst_secs = max(self.worst_secs, time.perf_counter() - began)
        assert response.status == 200

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def during(self, work: Callable[[], object]) -> float:
        """The worst probe while a function runs in another thread; its error is raised."""
        self.worst_secs = 0.0
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except (AssertionError, OSError, grpc.RpcError) as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            self.ask()
            thread.join(PAUSE_SECS)
        if errors:
            raise errors[0]
        return self.worst_secs


@pytest.fixture(scope="module", params=TRANSPORTS)
def over_grpc(
    request: pytest.FixtureRequest, repository: Path, environment: dict[str, str]
) -> Iterator[Serving]:
    """A server with each transport of gRPC in turn."""
    with serving(
        repository, f"--grpc-transport={request.param}", environment=environment
    ) as started:
        yield started


@contextmanager
def probing(server: Serving) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Checks that a call delays no probe by more than LIMIT_SECS.

    Of a slower answer the part is taken off that the machine adds: twice the worst probe among
    small requests, which keep the server as busy and block it for a moment each.
    """
    probes = Probes(server.ports["http"])

    def check(work: Callable[[], object]) -> None:
        worst = probes.during(work)
        if worst > LIMIT_SECS:
            busy = probes.during(partial(keep_busy, server))
            assert worst <= LIMIT_SECS + 2 * busy, f"a probe took {worst:.3f} s, busy {busy:.3f} s"

    try:
        yield check
    finally:
        probes.close()


def keep_busy(server: Serving) -> None:
    """Small requests one after the other."""
    body = infer_body("FP32", data := filled(b"1.5,", SMALL), data.count(b",") + 1)
    ends_at = time.monotonic() + BUSY_SECS
    while time.monotonic() < ends_at:
        answered(post(server, "/v2/models/echo_fp32/infer", body), 200)


def post(server: Serving, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=ANSWER_SECS)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def filled(piece: bytes, size: int = LARGEST) -> bytes:
    """Values of about `size` bytes in all, each followed by a comma but the last."""
    return piece * (size // len(piece)) + piece[:-1]


def infer_body(datatype: str, data: bytes, count: int) -> bytes:
    """A request with a colon in its id, whose answer leaves out what it was given."""
    head = b'{"id":"a:b","inputs":[{"name":"INPUT","datatype":"%b","shape":[%d],"data":['
    return head % (datatype.encode(), count) + data + b"]}]}"


@pytest.mark.parametrize(
    ("datatype", "piece"),
    [
        ("FP32", b"1.5,"),
        pytest.param("FP32", b"NaN,", marks=pytest.mark.release),
        ("INT32", b"[7],"),
        ("BYTES", b'"a:b",'),
    ],
)
def test_json_of_the_largest_size_blocks_no_other_client(
    server: Serving, datatype: str, piece: bytes
) -> None:
    data = filled(piece, LARGEST // 4)
    count = data.count(b",") + 1
    body = infer_body(datatype, data, count)
    path = f"/v2/models/echo_{datatype.lower()}/infer"
    with probing(server) as check:
        check(lambda: answered(post(server, path, body), 200))


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_large_answers_of_generate_block_no_other_client(server: Serving, path: str) -> None:
    numbers = b'{"INPUT":[%b]}' % filled(b"1.5,", 4 * (1 << 20) - 4)
    with probing(server) as check:
        check(lambda: answered(post(server, f"/v2/models/echo_fp32/{path}", numbers), 200))


def test_json_that_is_refused_for_its_count_blocks_no_other_client(server: Serving) -> None:
    body = infer_body("FP32", filled(b"1,"), 5)
    with probing(server) as check:
        check(lambda: answered(post(server, "/v2/models/echo_fp32/infer", body), 500))


def test_one_string_of_the_largest_size_blocks_no_other_client(server: Serving) -> None:
    body = b'{"text_input":"%b","n":1}' % (b"\\u00e4:" * (LARGEST // 7))
    with probing(server) as check:
        check(lambda: answered(post(server, "/v2/models/repeat/generate", body), 200))


@pytest.mark.parametrize(
    "path",
    [
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/repository/index",
        "/v2/repository/models/none/load",
        "/v2/systemsharedmemory/region/none/register",
        "/v2/models/echo_fp32/generate",
        "/v2/models/repeat/generate_stream",
        "/v1/chat/completions",
        "/v1/embeddings",
    ],
)
def test_numbers_for_any_route_block_no_other_client(server: Serving, path: str) -> None:
    body = b'{"none":[%b]}' % filled(b"1,", LARGEST // 4)
    with probing(server) as check:
        check(lambda: refused(post(server, path, body)))


def test_files_of_a_load_block_no_other_client(server: Serving) -> None:
    files = b"QUJD" * (LARGEST // 4)
    body = b'{"parameters":{"config":"{}","file:1/x":"%b"}}' % files
    with probing(server) as check:
        check(lambda: refused(post(server, "/v2/repository/models/new/load", body)))


def test_binary_strings_block_no_other_client(server: Serving) -> None:
    count = LARGEST // 5
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "INPUT",
                    "datatype": "BYTES",
                    "shape": [count + 1],
                    "parameters": {"binary_data_size": 5 * count},
                }
            ]
        }
    ).encode()
    body = head + b"\1\0\0\0a" * count
    headers = {"Inference-Header-Content-Length": str(len(head))}
    with probing(server) as check:
        check(lambda: answered(post(server, "/v2/models/echo_bytes/infer", body, **headers), 400))


def answered(found: tuple[int, bytes], status: int) -> None:
    assert found[0] == status, found[1][:300]


def refused(found: tuple[int, bytes]) -> None:
    """The request is answered, with any status."""
    assert 200 <= found[0] < 600


# gRPC.

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def typed(datatype: str, field: str, values: Any) -> Any:
    """A message with typed contents."""
    found = service_pb2.ModelInferRequest(model_name=f"echo_{datatype.lower()}", id="large")
    given = found.inputs.add(name="INPUT", datatype=datatype, shape=[len(values)])
    getattr(given.contents, field).extend(values)
    return found


def stub(server: Serving) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(
        grpc.insecure_channel(server.grpc, options=UNLIMITED)
    )


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("FP32", "fp32_contents", np.zeros(2 << 20, np.float32)),
        ("INT32", "int_contents", np.full(2 << 20, -1, np.int32)),
        ("BYTES", "bytes_contents", [b""] * (2 << 20)),
    ],
)
def test_typed_contents_block_no_other_client(
    over_grpc: Serving, datatype: str, field: str, values: Any
) -> None:
    # In bytes: to write and read messages would hold up the probes of this process.
    message = typed(datatype, field, values).SerializeToString()
    with grpc.insecure_channel(over_grpc.grpc, options=UNLIMITED) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with probing(over_grpc) as check:
            check(partial(infer, message, timeout=ANSWER_SECS))


def test_requests_of_a_stream_are_taken_in_their_order_also_behind_a_large_one(
    over_grpc: Serving,
) -> None:
    large = typed("FP32", "fp32_contents", np.zeros(4 << 20, np.float32))
    small = [typed("FP32", "fp32_contents", [float(number)]) for number in range(5)]
    for number, each in enumerate(small):
        each.id = str(number)
    stream = stub(over_grpc).ModelStreamInfer(iter([large, *small]), timeout=ANSWER_SECS)
    assert [each.infer_response.id for each in stream] == ["large", *"01234"]


def test_streams_of_others_keep_their_pace(over_grpc: Serving) -> None:
    body = infer_body("FP32", data := filled(b"1.5,", LARGEST // 4), data.count(b",") + 1)
    with neighbour(over_grpc.grpc) as beside:
        answered(post(over_grpc, "/v2/models/echo_fp32/infer", body), 200)
        found = beside.served()
        assert not found.errors
        if found.p99_secs > LIMIT_SECS:
            keep_busy(over_grpc)
            assert found.p99_secs <= LIMIT_SECS + 2 * beside.served().p99_secs
