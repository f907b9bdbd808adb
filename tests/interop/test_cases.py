"""The cases that gRPC publishes for servers (grpc/doc/interop-test-descriptions.md)."""

import pytest

from gateway.frontends.grpc.status import StatusCode
from tests.builders import soon
from tests.interop.clients import Client
from tests.interop.messages import Empty, download, unary, upload
from tests.interop.service import ECHO_INITIAL, ECHO_TRAILING, InteropServicer

LARGE_REQUEST, LARGE_RESPONSE = 271_828, 314_159
REQUESTS = (27182, 8, 1828, 45904)
RESPONSES = (31415, 9, 2653, 58979)
METADATA = ((ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\xab"))
STATUS = {"code": 2, "message": "test status message"}
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP \U0001f608\t\n"


def sizes(responses: list[object]) -> list[int]:
    """The number of bytes of each payload; all are zeros."""
    bodies = [response.payload.body for response in responses]
    assert all(not body.strip(b"\0") for body in bodies)
    return [len(body) for body in bodies]


async def test_empty_unary(client: Client) -> None:
    assert await client.only("EmptyCall", Empty()) == Empty()


async def test_large_unary(client: Client) -> None:
    response = await client.only("UnaryCall", unary(LARGE_RESPONSE, LARGE_REQUEST))

    assert sizes([response]) == [LARGE_RESPONSE]


async def test_client_streaming(client: Client) -> None:
    response = await client.only("StreamingInputCall", *map(upload, REQUESTS))

    assert response.aggregated_payload_size == sum(REQUESTS) == 74922


async def test_server_streaming(client: Client) -> None:
    responses, outcome = await client.answers("StreamingOutputCall", download(*RESPONSES))

    assert (sizes(responses), outcome.code) == (list(RESPONSES), "OK")


async def test_ping_pong(client: Client) -> None:
    rpc = client.call("FullDuplexCall")

    for asked, wanted in zip(REQUESTS, RESPONSES, strict=True):
        await rpc.ask(download(wanted, payload_size=asked))
        assert sizes([await rpc.answer()]) == [wanted]

    assert await rpc.rest() == []
    assert (await rpc.outcome()).code == "OK"


async def test_half_duplex(client: Client) -> None:
    asked = [download(size) for size in RESPONSES]

    responses, outcome = await client.answers("HalfDuplexCall", *asked)

    assert (sizes(responses), outcome.code) == (list(RESPONSES), "OK")


async def test_empty_stream(client: Client) -> None:
    responses, outcome = await client.answers("FullDuplexCall")

    assert (responses, outcome.code) == ([], "OK")


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("UnaryCall", unary(LARGE_RESPONSE, LARGE_REQUEST)),
        ("FullDuplexCall", download(LARGE_RESPONSE)),
    ],
    ids=["unary", "streamed"],
)
async def test_custom_metadata(client: Client, method: str, request_message: object) -> None:
    responses, outcome = await client.answers(method, request_message, metadata=METADATA)

    assert sizes(responses) == [LARGE_RESPONSE]
    assert outcome.initial[ECHO_INITIAL] == "test_initial_metadata_value"
    assert outcome.trailing[ECHO_TRAILING] == b"\xab\xab\xab"


@pytest.mark.parametrize("value", [b"", b"\0", b"\0\xff", b"\0\xff\n", bytes(range(256)) * 20])
async def test_binary_metadata_of_every_length_is_echoed(client: Client, value: bytes) -> None:
    metadata = ((ECHO_TRAILING, value),)

    _, outcome = await client.answers("UnaryCall", unary(), metadata=metadata)

    assert outcome.trailing[ECHO_TRAILING] == value


@pytest.mark.parametrize(
    ("method", "asked"),
    [("UnaryCall", unary), ("FullDuplexCall", download)],
    ids=["unary", "streamed"],
)
async def test_status_code_and_message(client: Client, method: str, asked: type) -> None:
    responses, outcome = await client.answers(method, asked(response_status=STATUS))

    assert (responses, outcome.code, outcome.details) == ([], "UNKNOWN", "test status message")


@pytest.mark.parametrize("code", range(1, 17))
async def test_every_status_arrives(client: Client, code: int) -> None:
    asked = unary(response_status={"code": code, "message": f"status {code}"})

    _, outcome = await client.answers("UnaryCall", asked)

    assert (outcome.code, outcome.details) == (StatusCode(code).name, f"status {code}")


@pytest.mark.parametrize("method", ["UnaryCall", "FullDuplexCall"])
async def test_special_status_message(client: Client, method: str) -> None:
    asked = unary if method == "UnaryCall" else download

    _, outcome = await client.answers(
        method, asked(response_status={"code": 2, "message": SPECIAL})
    )

    assert (outcome.code, outcome.details) == ("UNKNOWN", SPECIAL)


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.testing.TestService/UnimplementedCall",
        "/grpc.testing.UnimplementedService/UnimplementedCall",
    ],
)
async def test_unimplemented(client: Client, path: str) -> None:
    _, outcome = await client.answers(path, Empty())

    assert outcome.code == "UNIMPLEMENTED"


async def test_cancel_after_begin(client: Client, servicer: InteropServicer) -> None:
    rpc = client.call("StreamingInputCall")
    assert await soon(servicer.begun.get()) == "StreamingInputCall"

    rpc.cancel()

    assert (await rpc.outcome()).code == "CANCELLED"
    method, _ = await soon(servicer.ended.get())
    assert method == "StreamingInputCall"


async def test_cancel_after_first_response(client: Client, servicer: InteropServicer) -> None:
    rpc = client.call("FullDuplexCall")
    await rpc.ask(download(RESPONSES[0], payload_size=REQUESTS[0]))
    assert sizes([await rpc.answer()]) == [RESPONSES[0]]

    rpc.cancel()

    assert await rpc.answer() is None
    assert (await rpc.outcome()).code == "CANCELLED"
    method, _ = await soon(servicer.ended.get())
    assert method == "FullDuplexCall"


@pytest.mark.parametrize("method", ["StreamingOutputCall", "FullDuplexCall"])
async def test_cancelling_ends_a_method_that_does_not_read(
    client: Client, servicer: InteropServicer, method: str
) -> None:
    rpc = client.call(method)
    await rpc.ask(download(1, 1, sleeps=True))
    assert sizes([await rpc.answer()]) == [1]

    rpc.cancel()

    assert await soon(servicer.ended.get()) == (method, "CancelledError")


async def test_timeout_on_sleeping_server(client: Client) -> None:
    rpc = client.call("FullDuplexCall", timeout=0.001)
    await rpc.ask(download(31415, payload_size=27182, sleeps=True))

    assert await rpc.answer() is None
    # grpc.aio says INTERNAL by itself where its write comes after the deadline.
    codes = {"DEADLINE_EXCEEDED", *(["INTERNAL"] if client.kind == "aio" else [])}
    assert (await rpc.outcome()).code in codes


@pytest.mark.parametrize("method", ["StreamingOutputCall", "FullDuplexCall"])
async def test_a_deadline_ends_the_method_too(
    client: Client, servicer: InteropServicer, method: str
) -> None:
    rpc = client.call(method, timeout=0.2)
    await rpc.ask(download(1, sleeps=True))

    assert await soon(servicer.ended.get()) == (method, "CancelledError")
    assert (await rpc.outcome()).code == "DEADLINE_EXCEEDED"
