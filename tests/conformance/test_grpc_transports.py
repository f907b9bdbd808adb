"""Errors that only a transport can cause: each row of the README's table, on each transport."""

import asyncio
import gzip
import re
import struct
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame

from gateway.frontends.grpc import grpcio_transport, hyper_call
from gateway.frontends.grpc.rpc import Method, RpcCall
from gateway.frontends.grpc.server import TRANSPORTS
from gateway.protos import grpc_service_pb2 as pb
from gateway.settings import GrpcSettings, GrpcTransport
from tests.conformance.models import NEVER_US, identity
from tests.http2 import Answer, Connection, message, request
from tests.serving import ROOT, serving, write_model

SERVICE = "/inference.GRPCInferenceService"
LIVE, READY = f"{SERVICE}/ServerLive", f"{SERVICE}/ModelReady"
INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
PAGE = ROOT / "gateway/frontends/grpc/README.md"
HEADING = "## Errors that only a transport can cause"
IN_SECS = ("grpc-timeout", "10S")
SOON = ("grpc-timeout", "300m")
GZIP, DEFLATE = ("grpc-encoding", "gzip"), ("grpc-encoding", "deflate")
DECOMPRESSED = "a message above the limit after decompression"
"""With the limit as it is, a test of it would take 2 GiB."""

ASKED = pb.ModelReadyRequest(name="echo").SerializeToString()
STUCK = pb.ModelInferRequest(
    model_name="stuck",
    inputs=[pb.ModelInferRequest.InferInputTensor(name="INPUT", datatype="BYTES", shape=[1])],
    raw_input_contents=[struct.pack("<L", 1) + b"x"],
).SerializeToString()

Fields = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: what a client learns, which text it gets, and grpcio's status."""

    status: str
    http_status: int
    text: re.Pattern[str] | None
    grpcio: str

    def expected(self, transport: GrpcTransport) -> str:
        return self.grpcio if transport is GrpcTransport.GRPCIO else self.status


def read_table() -> Mapping[str, Row]:
    """The README's rows by their cause."""
    _, _, rest = PAGE.read_text().partition(HEADING)
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return {cause: _row(status, text, grpcio) for cause, status, text, grpcio in cells}


def _row(status: str, text: str, grpcio: str) -> Row:
    http_status = re.search(r"HTTP (\d+)", status)
    pattern = re.escape(text.strip("`")).replace(re.escape("..."), ".*")
    name = status.split("`")[1]
    return Row(
        name,
        int(http_status[1]) if http_status else 200,
        None if text.startswith("-") else re.compile(pattern, re.DOTALL),
        name if grpcio.startswith("the same") else grpcio.split("`")[1],
    )


@dataclass(frozen=True, slots=True)
class Sent:
    """A request: its headers, and the bytes of its body; None if its headers are its end."""

    fields: Fields
    body: bytes | None = message(ASKED)
    half_closed: bool = True

    def send(self, connection: Connection) -> None:
        flags = () if self.body is not None else ("END_STREAM",)
        block = connection.headers(1, self.fields, *flags).data
        parts = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
        frames = [HeadersFrame(1, parts[0], flags=flags)]
        frames += [ContinuationFrame(1, part) for part in parts[1:]]
        frames[-1].flags.add("END_HEADERS")
        if self.body is not None:
            ending = ("END_STREAM",) if self.half_closed else ()
            frames.append(DataFrame(1, self.body, flags=ending))
        connection.send(*frames)


def unary(*more: tuple[str, str | bytes], body: bytes | None = message(ASKED)) -> Sent:
    return Sent(request(READY, *more), body)


def streamed(*more: tuple[str, str | bytes], body: bytes | None = b"") -> Sent:
    return Sent(request(STREAM, *more), body)


def both(*more: tuple[str, str | bytes], body: bytes) -> Sequence[Sent]:
    return unary(*more, body=body), streamed(*more, body=body)


PACKED = gzip.compress(ASKED)
MALFORMED = (
    *(b"garbage", PACKED[:-1], PACKED[:-8] + bytes(8), PACKED + b"x", PACKED + PACKED),
    zlib.compress(ASKED),
)

CAUSES: Mapping[str, Sequence[Sent]] = {
    "an unknown path": [
        *(Sent(request(path)) for path in (f"{SERVICE}/No", "/no.Such/Method", "no", "")),
        *(Sent(request(path), b"", half_closed=False) for path in (f"{LIVE}?x", f"{LIVE}/")),
    ],
    "an HTTP method other than POST": [
        Sent(request(LIVE, (":method", "GET")), None),
        Sent(request(LIVE, (":method", "PUT"))),
        Sent(request(LIVE, without=[":method"])),
    ],
    "no `:path`": [Sent(request("", without=[":path"]))],
    "a content type other than `application/grpc`": [
        *(unary(("content-type", each)) for each in ("text/plain", "application/grpc-web", "")),
        Sent(request(READY, without=["content-type"])),
    ],
    "no `te`": [Sent(request(READY, without=["te"]))],
    "a `te` other than `trailers`": [unary(("te", "gzip")), streamed(("te", "trailers, gzip"))],
    "a connection-specific header (`connection`), a wrong `content-length`": [
        *(unary((name, "close")) for name in ("connection", "keep-alive", "transfer-encoding")),
        *(unary(("content-length", each)) for each in ("1", "x")),
    ],
    "a header name that HTTP/2 forbids": [unary(("X-Upper", "a")), unary(("x y", "a"))],
    "metadata of more than 32 KiB": [
        unary(*((f"x-{number}", "x" * 1000) for number in range(40))),
    ],
    "`-bin` metadata that are not base64": [
        *(unary(("x-bin", value)) for value in ("!!!", "aaaaa", "_-_-")),
        streamed(("x-bin", "!!!")),
    ],
    "a malformed `grpc-timeout`": [
        *(unary(("grpc-timeout", each)) for each in ("", "abc", "S", "10", "-1S", "1x", "1.5S")),
        streamed(("grpc-timeout", "abc")),
    ],
    "a `grpc-timeout` of more than eight digits": [unary(("grpc-timeout", "123456789S"))],
    "a deadline that passes before or during the RPC": [
        *(Sent(request(INFER, ("grpc-timeout", each)), message(STUCK)) for each in ("0n", "0H")),
        *(Sent(request(each, SOON), b"", half_closed=False) for each in (READY, STREAM)),
        Sent(request(INFER, SOON), message(STUCK)),
        Sent(request(STREAM, SOON), message(STUCK)),
    ],
    "an unknown `grpc-encoding`": [
        *(unary(("grpc-encoding", each)) for each in ("snappy", "GZIP", "gzip,identity")),
        streamed(("grpc-encoding", "snappy")),
    ],
    "a compressed message without `grpc-encoding`": [
        *both(body=message(PACKED, 1)),
        *both(("grpc-encoding", "identity"), body=message(PACKED, 1)),
    ],
    "a compressed message that is malformed, incomplete or too long": [
        *(unary(GZIP, body=message(each, 1)) for each in MALFORMED),
        unary(DEFLATE, body=message(PACKED, 1)),
        streamed(GZIP, body=message(b"garbage", 1)),
    ],
    "a message whose flag is neither 0 nor 1": [unary(body=message(ASKED, 2))],
    "a message above the limit, when its size is received": [
        Sent(request(path), struct.pack(">BL", 0, size), half_closed=False)
        for path in (READY, STREAM)
        for size in (1 << 31, (1 << 32) - 1)
    ],
    "a message that protobuf cannot parse": both(body=message(b"\xff\xff")),
    "a stream that ends within a message": [
        streamed(body=body) for body in (b"\0", bytes(4), message(ASKED)[:-1])
    ],
    "a unary RPC that ends within its message": [
        unary(SOON, body=body) for body in (b"\0", bytes(4), message(ASKED)[:-1])
    ],
    "a unary RPC that ends without a message": [unary(SOON, body=b""), unary(SOON, body=None)],
    "a unary RPC with several messages": [unary(body=2 * message(ASKED))],
}
TABLE = read_table()


@pytest.fixture(scope="module", params=list(GrpcTransport))
def transport(request: pytest.FixtureRequest) -> GrpcTransport:
    """Each transport in turn."""
    found: GrpcTransport = request.param
    return found


@pytest.fixture(scope="module")
def port(transport: GrpcTransport, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The address of a server of that transport; it ends well, and without a word of a defect."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "echo", identity("FP32"))
    write_model(repository, "stuck", identity("BYTES", "1", delay_us=NEVER_US, concurrency=0))
    with serving(repository, f"--grpc-transport={transport}") as server:
        yield server.ports["grpc"]
    assert server.process.returncode == 0, server.text
    assert "Traceback" not in server.text


def answer(port: int, sent: Sent) -> Answer:
    """The bytes of an answer; of a connection that was ended, none."""
    with Connection(port) as connection:
        connection.begin()
        try:
            sent.send(connection)
            return connection.answer(1)
        except ConnectionError:
            return Answer()


def test_every_row_of_the_table_has_a_test() -> None:
    assert TABLE.keys() == {*CAUSES, DECOMPRESSED}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_only_a_transport_can_cause_has_one_status(
    port: int, transport: GrpcTransport, cause: str
) -> None:
    row = TABLE[cause]
    for sent in CAUSES[cause]:
        found = answer(port, sent)
        assert found.client_status == row.expected(transport), (sent, found)
        if transport is GrpcTransport.HYPER:
            assert found.http_status == (row.http_status if row.text else 0)
            assert row.text is None or row.text.fullmatch(found.grpc_message), found
        assert answer(port, unary()).client_status == "OK"


def test_every_answer_names_the_encodings_that_are_accepted(
    port: int, transport: GrpcTransport
) -> None:
    asked = [unary()]
    if transport is GrpcTransport.HYPER:  # grpcio forgets it where it matters most
        asked.append(unary(("grpc-encoding", "snappy")))
    for sent in asked:
        found = answer(port, sent).text("grpc-accept-encoding") or ""
        assert {*found.replace(" ", "").split(",")} == {"identity", "gzip", "deflate"}


@pytest.mark.parametrize("content_type", ["application/grpc+json", "application/grpc;charset=x"])
def test_content_types_of_grpc_are_served(port: int, content_type: str) -> None:
    assert answer(port, unary(("content-type", content_type))).client_status == "OK"


def test_an_error_ends_a_request_whose_body_is_still_being_sent(port: int) -> None:
    with Connection(port) as connection:
        connection.begin()
        Sent(request(f"{SERVICE}/No"), b"", half_closed=False).send(connection)
        assert connection.answer(1).client_status == "UNIMPLEMENTED"
        connection.send(DataFrame(1, bytes(1000)), DataFrame(1, b"", flags=("END_STREAM",)))
        connection.send(
            connection.headers(3, request(READY)),
            DataFrame(3, message(ASKED), flags=("END_STREAM",)),
        )
        assert connection.answer(3).client_status == "OK"


def test_an_error_of_a_model_reaches_the_client_letter_by_letter(port: int) -> None:
    name = "100% \xe4\n\t\r\u20ac~\x7f%41"
    asked = pb.ModelInferRequest(model_name=name).SerializeToString()
    found = answer(port, Sent(request(INFER), message(asked)))
    assert found.client_status == "NOT_FOUND"
    assert f"'{name}'" in found.grpc_message


LIMIT = 1000
SIZE = "/test.Service/Size"


@pytest.fixture
async def limited(transport: GrpcTransport, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a transport for messages of up to LIMIT bytes; its method returns their size."""

    async def size(message: bytes, call: RpcCall) -> bytes:
        return str(len(message)).encode()

    for module in (grpcio_transport, hyper_call):
        monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", LIMIT)
    settings = GrpcSettings(address="127.0.0.1", port=0)
    found = TRANSPORTS[transport]({SIZE: Method(size, bytes, bytes)}, settings)
    await found.start()
    yield found.port
    await asyncio.gather(found.stop(), found.cut_off(10.0))


async def limited_answer(port: int, body: bytes, *more: tuple[str, str]) -> Answer:
    return await asyncio.to_thread(answer, port, Sent(request(SIZE, *more), body))


async def test_a_message_may_be_as_large_as_the_limit_and_no_larger(limited: int) -> None:
    row = TABLE["a message above the limit, when its size is received"]
    fitting = await limited_answer(limited, message(bytes(LIMIT)))
    assert fitting.messages == [str(LIMIT).encode()]
    larger = await limited_answer(limited, message(bytes(LIMIT + 1)))
    assert larger.client_status == row.status


@pytest.mark.parametrize("size", [LIMIT + 1, 500 * LIMIT])
async def test_a_message_may_be_no_larger_than_the_limit_once_it_is_decompressed(
    limited: int, transport: GrpcTransport, size: int
) -> None:
    fitting = await limited_answer(limited, message(gzip.compress(bytes(LIMIT)), 1), GZIP)
    assert fitting.messages == [str(LIMIT).encode()]
    larger = await limited_answer(limited, message(gzip.compress(bytes(size)), 1), GZIP)
    assert larger.client_status == TABLE[DECOMPRESSED].expected(transport)
