"""Requests whose head is that of the last one of their connection, byte for byte."""

import asyncio
import json
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path

import pytest

from gateway.dataplane import DataPlane
from gateway.frontends.http.connection import HEAD_END, BoundedProtocol
from gateway.policy.api_keys import ApiKeys
from gateway.policy.credentials import Credentials, Reason
from gateway.settings import HttpTimeLimits
from tests.builders import WAIT_SECS, ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.test_infer import ANSWER, ASK, BODY, ECHO, PATH, echo
from tests.gateway.frontends.http.test_infer_without_task import (
    PAUSE_SECS,
    REQUESTS,
    answer_of,
    give_back,
    served,
)
from tests.raw import post

MIXED = ("json", "binary", "compressed", "another route")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An item for each request that the parser has had."""
    found: list[None] = []
    begin = BoundedProtocol.on_message_begin

    def counted(protocol: BoundedProtocol) -> None:
        found.append(None)
        begin(protocol)

    monkeypatch.setattr(BoundedProtocol, "on_message_begin", counted)
    return found


def asked(number: int, *headers: str) -> bytes:
    """A request with this number of one digit as its id."""
    return post(PATH, json.dumps({"id": f"{number}", **ASK}).encode(), *headers)


def id_of(response: bytes) -> int:
    return int(json.loads(response.partition(b"\r\n\r\n")[2])["id"])


async def exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    requests: Iterable[bytes],
    *,
    divided: bool = False,
) -> None:
    """Send requests one after the other; each response has the id of its request, from 0 on."""
    for number, request in enumerate(requests):
        head, body = halves(request)
        writer.write(head if divided else request)
        if divided:
            await asyncio.sleep(PAUSE_SECS)
            writer.write(body)
        assert id_of(await answer_of(reader)) == number


def halves(request: bytes) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    end = request.index(HEAD_END) + len(HEAD_END)
    return request[:end], request[end:]


async def test_requests_with_the_same_head_are_parsed_once(
    serve: Serve, parsed: list[None]
) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        await exchange(reader, writer, map(asked, range(5)))
        assert len(parsed) == 1
        await exchange(reader, writer, [asked(number, "X-Other: 1") for number in range(5)])
        assert len(parsed) == 2


async def test_a_known_head_waits_for_its_body(serve: Serve, parsed: list[None]) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        await exchange(reader, writer, map(asked, range(5)), divided=True)
        assert len(parsed) == 1
        await exchange(reader, writer, map(asked, range(5)))
        await exchange(reader, writer, map(asked, range(5)), divided=True)
        assert len(parsed) == 1
        await exchange(reader, writer, [asked(each, "X-O: 1") for each in range(5)], divided=True)
        assert len(parsed) == 2


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_known_head_without_a_body_times_out(serve: Serve, *, has_begun: bool) -> None:
    limits = HttpTimeLimits(head_secs=0, body_idle_secs=0.1, connection_idle_secs=0)
    async with served(serve(echo(), config=ECHO), limits=limits) as server:
        reader, writer = await server.connect()
        await exchange(reader, writer, [asked(0)])
        head, body = halves(asked(1))
        writer.write(head)
        if has_begun:
            await asyncio.sleep(PAUSE_SECS)
            writer.write(body[:1])
        late = await soon(reader.read())
    assert late.startswith(b"HTTP/1.1 408 ")
    assert b"no byte of the request body came within 0.1 s" in late


async def test_the_time_of_a_body_begins_with_its_head(serve: Serve) -> None:
    limits = HttpTimeLimits(head_secs=0, body_idle_secs=0.8, connection_idle_secs=0)
    async with served(serve(echo(), config=ECHO), limits=limits) as server:
        reader, writer = await server.connect()
        await exchange(reader, writer, [asked(0)])
        for part in halves(asked(1)):
            await asyncio.sleep(0.5)
            writer.write(part)
        assert id_of(await answer_of(reader)) == 1


async def test_the_head_of_an_earlier_request_is_not_that_of_a_divided_one(serve: Serve) -> None:
    other = REQUESTS["no model"]
    head, body = halves(other)
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        for part in (*halves(REQUESTS["json"]), head[:20], head[20:], body):
            writer.write(part)
            await asyncio.sleep(PAUSE_SECS)
        assert (await answer_of(reader)).endswith(ANSWER.encode())
        assert (await answer_of(reader)).startswith(b"HTTP/1.1 404 ")
        writer.write(REQUESTS["json"])
        assert (await answer_of(reader)).endswith(ANSWER.encode())


async def test_a_known_head_is_answered_while_the_server_stops(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        idle, _ = await server.connect()
        await exchange(reader, writer, [asked(0)])
        head, body = halves(asked(1))
        writer.write(head)
        await asyncio.sleep(PAUSE_SECS)
        server.listener.stop(WAIT_SECS)
        assert await soon(idle.read()) == b""
        writer.write(body)
        assert id_of(await answer_of(reader)) == 1
        assert await soon(reader.read()) == b""


async def test_a_known_head_without_a_body_is_half_a_request(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        idle, idle_writer = await server.connect()
        await exchange(reader, writer, [asked(0)])
        writer.write(halves(asked(1))[0])
        await asyncio.sleep(PAUSE_SECS)
        server.listener.drop_half_requests()
        assert await soon(reader.read()) == b""
        await exchange(idle, idle_writer, [asked(0)])


async def test_a_client_may_disconnect_behind_a_known_head(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        await exchange(reader, writer, [asked(0)])
        writer.write(halves(asked(1))[0])
        await asyncio.sleep(PAUSE_SECS)
        writer.close()
        for _ in range(100):
            await asyncio.sleep(PAUSE_SECS)
            if not server.connections:
                break
        assert not server.connections


async def test_a_known_head_of_a_get_has_no_body(serve: Serve) -> None:
    head = b"GET /v2/models/echo HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(head)
            assert (await answer_of(reader)).startswith(b"HTTP/1.1 418 ")


async def test_the_first_bytes_of_a_divided_head_are_no_head(serve: Serve) -> None:
    head, body = halves(asked(1))
    path = b"POST /v2/models/other/infer HTTP/1.1\r\n"
    for first in range(1, 10):
        other = path + b"Content-Length: 2\r\nX: " + b"x" * 100
        other = other[: first + len(body) - 6] + b"\r\n\r\n{}"
        async with served(serve(echo(), config=ECHO)) as server:
            reader, writer = await server.connect()
            for part in (head[:first], head[first:], body):
                writer.write(part)
                await asyncio.sleep(PAUSE_SECS)
            assert id_of(await answer_of(reader)) == 1
            assert len(other) == first + len(body)
            writer.write(other)
            assert (await answer_of(reader)).startswith(b"HTTP/1.1 404 ")


async def test_requests_behind_a_repeated_one_are_served_after_an_error(serve: Serve) -> None:
    wrong = asked(0).replace(b'"id": "0"', b'"id": 0.5')
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(wrong)
        assert (await answer_of(reader)).startswith(b"HTTP/1.1 500 ")
        for number in (1, 2):
            writer.write(asked(number))
            await asyncio.sleep(PAUSE_SECS)
        for number in (1, 2):
            give_back(await instance.begun())
            assert id_of(await answer_of(reader)) == number


async def test_a_busy_connection_is_not_idle_after_an_error(serve: Serve) -> None:
    wrong = asked(0).replace(b'"id": "0"', b'"id": 0.5')
    limits = HttpTimeLimits(head_secs=0, body_idle_secs=0, connection_idle_secs=0.5)
    async with served(serve(echo(), config=ECHO), limits=limits) as server:
        reader, writer = await server.connect()
        writer.write(wrong)
        assert (await answer_of(reader)).startswith(b"HTTP/1.1 500 ")
        for _ in range(10):
            await asyncio.sleep(0.1)
            writer.write(asked(1))
            assert id_of(await answer_of(reader)) == 1


@pytest.mark.parametrize("cut", [0, 1])
async def test_a_length_may_begin_with_thousands_of_zeros(serve: Serve, cut: int) -> None:
    zeros = b"Content-Length: " + b"0" * 5000
    head, body = halves(asked(1).replace(b"Content-Length: ", zeros))
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        for _ in range(2):
            writer.write(head + body[:cut])
            await asyncio.sleep(PAUSE_SECS)
            writer.write(body[cut:])
            assert id_of(await answer_of(reader)) == 1


@pytest.mark.parametrize("is_body", [False, True])
async def test_empty_lines_before_a_request_are_no_head(serve: Serve, *, is_body: bool) -> None:
    request = post(PATH, BODY + b" " * (len(BODY) % 2))
    lines = b"\r\n" * (len(halves(request)[1]) // 2) if is_body else b""
    count = len(HEAD_END + lines) if is_body else len(request)
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(request)
        expected = await answer_of(reader)
        behind_lines = HEAD_END + request
        for sent in (HEAD_END + lines, behind_lines[:count], behind_lines[count:]):
            writer.write(sent)
            await asyncio.sleep(PAUSE_SECS)
        assert await answer_of(reader) == expected


@pytest.mark.parametrize(("one", "other"), [*permutations(MIXED, 2)])
async def test_answers_are_those_of_connections_of_their_own(
    serve: Serve, one: str, other: str
) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        mixed, writer = await server.connect()
        for name in (one, one, other, one, other, other, one):
            alone, own_writer = await server.connect()
            own_writer.write(REQUESTS[name])
            writer.write(REQUESTS[name])
            assert await answer_of(mixed) == await answer_of(alone)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_repeated_request_may_arrive_in_pieces(serve: Serve, name: str) -> None:
    request = REQUESTS[name]
    body = request.index(b"\r\n\r\n") + 4
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(request)
        expected = await answer_of(reader)
        for cut in (1, body - 2, body, body + 1, len(request)):
            writer.write(request[:cut])
            await asyncio.sleep(PAUSE_SECS)
            writer.write(request[cut:])
            assert await answer_of(reader) == expected


async def test_repeated_requests_may_be_pipelined(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(asked(1) + asked(2))
            assert [id_of(await answer_of(reader)) for _ in range(2)] == [1, 2]


async def test_a_repeated_request_waits_for_the_one_before_it(
    serve: Serve, parsed: list[None]
) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(asked(1))
        first = await instance.begun()
        writer.write(asked(2))
        await asyncio.sleep(PAUSE_SECS)
        assert len(parsed) == 2
        give_back(first)
        assert id_of(await answer_of(reader)) == 1
        give_back(await instance.begun())
        assert id_of(await answer_of(reader)) == 2


@pytest.mark.parametrize("length", ["Content-Length: 7", "Transfer-Encoding: chunked"])
async def test_bytes_behind_a_head_that_announces_fewer_are_not_its_body(
    serve: Serve, length: str, parsed: list[None]
) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode()
    data = head + (b"{}     " if "7" in length else b"2\r\n{}\r\n0\r\n\r\n")
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        for count in (1, 2, 3):
            writer.write(data + asked(count))
            assert (await answer_of(reader)).startswith(b"HTTP/1.1 500 ")
            assert id_of(await answer_of(reader)) == count
            assert len(parsed) == 2 * count


async def test_a_repeated_request_is_cancelled_when_its_client_disconnects(serve: Serve) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(asked(1))
        give_back(await instance.begun())
        await answer_of(reader)
        writer.write(asked(2))
        execution = await instance.begun()
        writer.close()
        await soon(execution.stopped.wait())


async def test_an_unlike_body_of_the_same_length_has_its_own_answer(serve: Serve) -> None:
    wrong = asked(1).replace(b'"id": "1"', b'"id": 1.5')
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        for _ in range(2):
            writer.write(asked(1))
            assert id_of(await answer_of(reader)) == 1
            writer.write(wrong)
            assert (await answer_of(reader)).startswith(b"HTTP/1.1 500 ")
        writer.write(REQUESTS["json"])
        assert (await answer_of(reader)).endswith(ANSWER.encode())


async def test_a_scope_that_an_application_has_had_is_not_used_again(
    serve: Serve, parsed: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = iter([True, False, False, True, True])
    monkeypatch.setattr(DataPlane, "begins_without_task", lambda *_: next(begins))
    async with served(serve(echo(), config=ECHO)) as server:
        await exchange(*await server.connect(), map(asked, range(5)))
    assert len(parsed) == 3


async def test_each_request_without_a_valid_key_is_refused_and_counted(
    serve: Serve, parsed: list[None], tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    credentials = Credentials(ApiKeys(file))
    async with served(serve(echo(), config=ECHO), credentials=credentials) as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(post(PATH, BODY, "x-api-key: wrong"))
            answer = await answer_of(reader)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert answer.endswith(b'{"error":"the API key is not valid"}')
        assert len(parsed) == 1
    assert credentials.refusals == {("http", Reason.WRONG): 3}
