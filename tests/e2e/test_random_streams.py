"""Random clients of diverted streams: whole answers are right, nothing hangs, nothing is left."""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import orjson
import pytest
from tritonclient.grpc import service_pb2_grpc

from loadtests.soak.http_clients import Closed, Connection, post
from tests.e2e.doors import DOORS, GENERATE, Door, message, texts
from tests.e2e.figures import changes, diverted, wait_at_rest
from tests.e2e.llama import ANSWER_SECS, Llama
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

SECS = 4.0
CLIENTS = 12
PROMPTS = ("Once upon a time", "The capital of France is")
SAMPLING = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
LEAVE_SECS = 0.4
SMALL_BUFFER = 4096
ENDED = (Closed, ConnectionError)


def test_random_clients_leave_an_engine_that_answers_and_holds_nothing(
    server: Serving, llama: Llama
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    before = diverted(server)
    with changes(server) as change:
        storm = asyncio.run(Storm(server, seed).run())
        wait_at_rest(server)
    llama.expect_answer()
    assert not storm.wrong
    assert storm.acts.keys() == ACTS.keys(), storm.acts
    assert change["nv_inference_request_success"] >= storm.acts["read a stream"]
    assert diverted(server) - before > CLIENTS


@dataclass(slots=True)
class Storm:
    """All clients; `acts` are counted by name, `wrong` has each answer that no act explains."""

    server: Serving
    seed: int
    acts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    expected: dict[tuple[str, str], str] = field(default_factory=dict)

    async def run(self) -> "Storm":
        """Keep every client busy for a while."""
        asked = [(door, text) for door in DOORS for text in PROMPTS]
        async with httpx.AsyncClient(base_url=self.server.http, timeout=ANSWER_SECS) as client:
            found = await asyncio.gather(*(_whole(client, *each) for each in asked))
        pairs = zip(asked, found, strict=True)
        self.expected = {(str(door), text): answer for (door, text), answer in pairs}
        ends_at = time.monotonic() + SECS
        await asyncio.gather(*(self._act(number, ends_at) for number in range(CLIENTS)))
        return self

    async def _act(self, number: int, ends_at: float) -> None:
        chance = random.Random(f"{self.seed} {number}")
        names = [*ACTS]
        name = names[number % len(names)]
        while time.monotonic() < ends_at:
            client = Client(self, chance, chance.choice(DOORS), chance.choice(PROMPTS))
            try:
                async with asyncio.timeout(ANSWER_SECS):
                    await ACTS[name](client)
            except (TimeoutError, AssertionError, ValueError, *ENDED) as error:
                self.wrong.append(f"{name}, {client.door}: {error!r}")
            self.acts[name] += 1
            name = chance.choice(names)


@dataclass(slots=True)
class Client:
    """One client with one request."""

    storm: Storm
    chance: random.Random
    door: Door
    text: str

    async def read_whole(self) -> None:
        """Read all of a stream."""
        async with self._connection() as connection:
            await connection.send(self._request())
            self._check(texts((await connection.answer()).body))

    async def leave(self) -> None:
        """Disconnect at some time."""
        async with self._connection() as connection:
            await connection.send(self._request())
            await self._pause()
            if self.chance.random() < 0.5:
                connection.reset()

    async def leave_midway(self) -> None:
        """Disconnect after some reads."""
        async with self._connection() as connection:
            await connection.send(self._request())
            for _ in range(self.chance.randrange(1, 6)):
                await connection.read()

    async def half_close(self) -> None:
        """Half-close; the server may answer."""
        async with self._connection() as connection:
            await connection.send(self._request("connection: close"))
            connection.half_close()
            await connection.drain()

    async def read_slowly(self) -> None:
        """Read a few bytes with pauses, then disconnect."""
        async with self._connection(SMALL_BUFFER) as connection:
            await connection.send(self._request())
            for _ in range(self.chance.randrange(4)):
                await self._pause()
                assert await asyncio.get_running_loop().sock_recv(connection.socket, 1)

    async def cancel(self) -> None:
        """Cancel a request by its id; the stream ends with what it had."""
        name = f"{self.chance.random()}"
        body = {**GENERATE.body(self.text, **SAMPLING), "id": name}
        async with self._connection() as connection, self._connection() as other:
            await connection.send(post(GENERATE.path, orjson.dumps(body)))
            await self._pause()
            await other.send(post(f"/v2/models/llama/requests/{name}/cancel", b"{}"))
            assert (await other.answer()).status in (200, 404)
            found = "".join(texts((await connection.answer()).body))
            expected = self.storm.expected[str(GENERATE), self.text]
            assert expected.startswith(found), found

    async def stream(self) -> None:
        """Read all messages of a ModelStreamInfer, or cancel it at some time."""
        leaves = self.chance.random() < 0.5
        async with grpc.aio.insecure_channel(self.storm.server.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelStreamInfer(iter([message(self.text, **SAMPLING)]))
            if leaves:
                await self._pause()
                call.cancel()
                return
            found = []
            async for answer in call:
                assert not answer.error_message
                found += [raw[4:].decode() for raw in answer.infer_response.raw_output_contents]
            assert "".join(found) == self.storm.expected[str(GENERATE), self.text]

    def _connection(self, receive_buffer: int = 0) -> Connection:
        return Connection(self.storm.server.ports["http"], receive_buffer)

    def _request(self, *headers: str) -> bytes:
        body = self.door.body(self.text, **SAMPLING)
        return post(self.door.path, orjson.dumps(body), *headers)

    def _check(self, found: Any) -> None:
        text = "".join(found)
        expected = self.storm.expected[str(self.door), self.text]
        assert text == expected, f"{text!r}, expected {expected!r}"

    async def _pause(self) -> None:
        await asyncio.sleep(self.chance.random() * LEAVE_SECS)


async def _whole(client: httpx.AsyncClient, door: Door, text: str) -> str:
    """The answer of a request without a stream."""
    path = door.path.replace("generate_stream", "generate")
    answer = await client.post(path, json=door.body(text, stream=False, **SAMPLING))
    return "".join(texts(b"data: " + answer.content))


ACTS: Mapping[str, Callable[[Client], Awaitable[None]]] = {
    "read a stream": Client.read_whole,
    "leave": Client.leave,
    "leave midway": Client.leave_midway,
    "half-close": Client.half_close,
    "read slowly": Client.read_slowly,
    "cancel by id": Client.cancel,
    "ModelStreamInfer": Client.stream,
}
