"""Messages of gRPC that are compressed: answers as the flag and the client say, requests always."""

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperframe.frame import DataFrame
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2

from tests.conformance.models import identity
from tests.http2 import Answer, Connection, message, request
from tests.rpc import infer_request
from tests.serving import Serving, serving, write_model

SERVICE = "/inference.GRPCInferenceService/"
TRANSPORTS = ("hyper", "grpcio")
WINDOW_BITS = {"gzip": 31, "deflate": 15}
BOTH = "identity,deflate,gzip"
ZEROS = "0" * 2000
UNLIKE = "".join(map(chr, range(32, 127)))
"""No character of it comes twice."""
LARGE = "0123456789" * 200_000
PLAIN, COMPRESSED = 0, 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "single", identity("BYTES", "1"))
    write_model(folder, "wordy", identity("BYTES", "1", note=ZEROS))
    return folder


@pytest.fixture(
    scope="module",
    params=[(each, level) for each in TRANSPORTS for level in ("none", "low", "medium", "high")],
    ids="-".join,
)
def leveled(request: pytest.FixtureRequest, models: Path) -> Iterator[tuple[Serving, str]]:
    """A server, and its level."""
    transport, level = request.param
    flags = (f"--grpc-transport={transport}", f"--grpc-infer-response-compression-level={level}")
    with serving(models, *flags) as found:
        yield found, level
    assert found.process.returncode == 0
    assert "Traceback" not in found.text


@pytest.fixture
def server(leveled: tuple[Serving, str]) -> Serving:
    return leveled[0]


@pytest.fixture
def level(leveled: tuple[Serving, str]) -> str:
    return leveled[1]


def expected(level: str, accepted: str) -> str:
    """The choice of gRPC's C-core, by its own table: (low, medium, high) by what is accepted."""
    both, gzip, deflate = ("gzip", "deflate", "deflate"), ("gzip",) * 3, ("deflate",) * 3
    none = ("identity",) * 3
    table = {BOTH: both, "gzip": gzip, "deflate": deflate, "identity": none, "br,zstd": none}
    return (
        "identity" if level == "none" else table[accepted][("low", "medium", "high").index(level)]
    )


def asked(server: Serving, path: str, accepted: str, *messages: Any, encoding: str = "") -> Answer:
    headers = {"grpc-accept-encoding": accepted, "grpc-encoding": encoding}
    sent = [
        each if isinstance(each, bytes) else message(each.SerializeToString()) for each in messages
    ]
    with Connection(server.ports["grpc"]) as connection:
        named = request(SERVICE + path, *((name, text) for name, text in headers.items() if text))
        body = DataFrame(1, b"".join(sent), flags=("END_STREAM",))
        connection.begin().send(connection.headers(1, named), body)
        return connection.answer(1)


def flagged(answer: Answer) -> list[tuple[int, bytes]]:
    """Each message with its flag, decompressed by what the head says."""
    assert answer.grpc_status == 0, answer.grpc_message
    found, rest = [], answer.body
    while rest:
        flag, size = struct.unpack_from(">BL", rest)
        found.append(
            (flag, decompressed(answer, rest[5 : 5 + size]) if flag else rest[5 : 5 + size])
        )
        rest = rest[5 + size :]
    return found


def decompressed(answer: Answer, data: bytes) -> bytes:
    return zlib.decompress(data, WINDOW_BITS[answer.text("grpc-encoding") or ""])


def compressed(data: bytes, encoding: str) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, WINDOW_BITS[encoding])
    return message(packer.compress(data) + packer.flush(), COMPRESSED)


def texts(answer: Answer) -> Sequence[tuple[int, str]]:
    found = []
    for flag, data in flagged(answer):
        response = service_pb2.ModelStreamInferResponse.FromString(data)
        assert not response.error_message
        (output,) = response.infer_response.raw_output_contents
        found.append((flag, output[4:].decode()))
    return found


@pytest.mark.parametrize("accepted", [BOTH, "gzip", "deflate", "identity", "br,zstd"])
def test_an_answer_is_compressed_by_the_level_and_what_the_client_accepts(
    server: Serving, level: str, accepted: str
) -> None:
    answer = asked(server, "ModelInfer", accepted, infer_request("single", INPUT=ZEROS))
    encoding = expected(level, accepted)
    assert (answer.text("grpc-encoding") or "identity") == encoding
    ((flag, data),) = flagged(answer)
    assert flag == (PLAIN if encoding == "identity" else COMPRESSED)
    assert service_pb2.ModelInferResponse.FromString(data).raw_output_contents[0][4:] == (
        ZEROS.encode()
    )


def test_a_client_that_says_nothing_gets_plain_answers(server: Serving) -> None:
    answer = asked(server, "ModelInfer", "", infer_request("single", INPUT=ZEROS))
    assert [flag for flag, _ in flagged(answer)] == [PLAIN]


def test_a_message_is_compressed_only_if_that_makes_it_smaller(server: Serving, level: str) -> None:
    unlike, like = (infer_request("single", INPUT=text) for text in (UNLIKE, ZEROS))
    packed = PLAIN if level == "none" else COMPRESSED
    for asking, flag, text in ((unlike, PLAIN, UNLIKE), (like, packed, ZEROS)):
        ((found, data),) = flagged(asked(server, "ModelInfer", BOTH, asking))
        answer = service_pb2.ModelInferResponse.FromString(data)
        assert (found, answer.raw_output_contents[0][4:].decode()) == (flag, text)
    answer = asked(server, "ModelStreamInfer", BOTH, like, unlike, like)
    assert texts(answer) == [(packed, ZEROS), (PLAIN, UNLIKE), (packed, ZEROS)]


def test_what_management_answers_is_not_compressed(server: Serving) -> None:
    answer = asked(server, "ModelConfig", BOTH, service_pb2.ModelConfigRequest(name="wordy"))
    ((flag, data),) = flagged(answer)
    assert (flag, ZEROS.encode() in data) == (PLAIN, True)


def test_an_error_is_sent_at_every_level(server: Serving) -> None:
    answer = asked(server, "ModelInfer", BOTH, infer_request("absent", INPUT="x"))
    assert answer.grpc_status == 5
    assert "absent" in answer.grpc_message


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_and_uncompressed_requests_may_be_mixed_on_a_stream(
    server: Serving, encoding: str
) -> None:
    data = [
        infer_request("single", INPUT=f"{number}{ZEROS}").SerializeToString() for number in range(5)
    ]
    sent = [
        message(each) if number % 2 else compressed(each, encoding)
        for number, each in enumerate(data)
    ]
    answer = asked(server, "ModelStreamInfer", "identity", *sent, encoding=encoding)
    assert texts(answer) == [(PLAIN, f"{number}{ZEROS}") for number in range(5)]


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("text", ["", ZEROS, LARGE], ids=["empty", "zeros", "large"])
def test_the_official_client_sees_nothing_of_it(
    server: Serving, algorithm: str | None, text: str
) -> None:
    with InferenceServerClient(server.grpc) as client:
        tensor = InferInput("INPUT", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text], dtype=object))
        result = client.infer("single", [tensor], compression_algorithm=algorithm)
        assert result.as_numpy("OUTPUT").tolist() == [text.encode()]
