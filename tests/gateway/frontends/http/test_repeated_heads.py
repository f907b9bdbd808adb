"""Requests whose head is that of the last one of their connection, byte for byte."""

import asyncio
import json
from collections.abc import Iterable
from itertools import permutations

import pytest

from gateway.dataplane import DataPlane
from gateway.frontends.http.connection import BoundedProtocol
from tests.builders import ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.test_infer import ANSWER, ASK, ECHO, PATH, echo
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
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: Iterable[bytes]
) -> None:
    """Send requests one after the other; each response has the id of its request, from 0 on."""
    for number, request in enumerate(requests):
        writer.write(request)
        assert id_of(await answer_of(reader)) == number


async def test_requests_with_the_same_head_are_parsed_once(
    serve: Serve, parsed: list[None]
) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        await exchange(reader, writer, map(asked, range(5)))
        assert len(parsed) == 1
        await exchange(reader, writer, [asked(number, "X-Other: 1") for number in range(5)])
        assert len(parsed) == 2


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
