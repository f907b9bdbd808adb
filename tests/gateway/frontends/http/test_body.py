"""Bodies read within limits, and disconnects."""

import asyncio
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import MAX_CHUNKS, collect, decoded, off_loop, read_body
from gateway.frontends.http.request_scope import WATCH
from gateway.threads import LARGE_BYTES, Threads
from tests.builders import soon, uncollected
from tests.serving import wait_until


class Client:
    """The receiving side of ASGI: chunks of a body, and whether the client is still there."""

    def __init__(self, chunks: Sequence[bytes], *, leaves_early: bool = False) -> None:
        self.gone = asyncio.Event()
        self.taken = 0
        self._chunks = chunks
        self._leaves_early = leaves_early

    async def receive(self) -> Message:
        if self.taken < len(self._chunks):
            self.taken += 1
            more = self._leaves_early or self.taken < len(self._chunks)
            body = self._chunks[self.taken - 1]
            return {"type": "http.request", "body": body, "more_body": more}
        if not self._leaves_early:
            await self.gone.wait()
        return {"type": "http.disconnect"}

    def request(self, **headers: str) -> Request:
        raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        return Request({"type": "http", "method": "POST", "headers": raw}, self.receive)


@pytest.mark.parametrize(
    "chunks", [[b"0123456789"], [b"01234", b"56789"], [b"", b"0123456789", b""]]
)
async def test_a_body_is_joined_up_to_its_limit(chunks: list[bytes]) -> None:
    assert await soon(read_body(Client(chunks).request(), 10)) == b"0123456789"


async def test_a_body_beyond_the_limit_is_refused_before_it_is_complete() -> None:
    client = Client([b"01234", b"567890", b"never read"])
    with pytest.raises(InferenceError) as caught:
        await soon(read_body(client.request(), 10))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "request JSON size of 11 bytes exceeds the maximum allowed input size of 10 bytes. Use "
        "--http-max-input-size to increase the limit."
    )
    assert client.taken == 2


async def test_a_body_that_is_announced_as_too_large_is_not_read_at_all() -> None:
    client = Client([b"0"])
    with pytest.raises(InferenceError, match="request JSON size of 11 bytes exceeds"):
        await soon(read_body(client.request(content_length="11"), 10))
    assert client.taken == 0
    assert await soon(read_body(client.request(content_length="10"), 10)) == b"0"


async def test_the_number_of_chunks_of_a_body_has_a_limit() -> None:
    assert MAX_CHUNKS == 65536
    assert len(await soon(read_body(Client([b"x"] * MAX_CHUNKS).request(), 2**20))) == MAX_CHUNKS
    with pytest.raises(InferenceError) as caught:
        await soon(read_body(Client([b"x"] * (MAX_CHUNKS + 1)).request(), 2**20))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger "
        "HTTP chunks."
    )


async def test_a_disconnect_before_the_end_of_the_body_is_cancelled() -> None:
    with pytest.raises(InferenceError) as caught:
        await soon(read_body(Client([b"half"], leaves_early=True).request(), 10))
    assert caught.value.code is Code.CANCELLED


async def test_a_large_body_may_have_any_number_of_chunks() -> None:
    chunks, sizes = [b"x"] * (MAX_CHUNKS + 1), [0]
    found = await soon(collect(Client(chunks).receive, sizes.append, None))
    assert found == b"".join(chunks)
    assert sizes[-1] == len(chunks)


async def test_a_disconnect_while_the_body_is_decoded_drops_the_work() -> None:
    threads, gate, ran = Threads("test", 1), threading.Event(), list[str]()
    watched: list[Any] = []
    scope = {"state": {WATCH: watched.append}}
    first = threads.start(gate.wait, 20.0)
    decoding = asyncio.create_task(off_loop(threads, scope, ran.append, "decoded"))
    await asyncio.sleep(0)
    (disconnect,) = watched
    disconnect()
    with pytest.raises(InferenceError) as caught:
        await soon(decoding)
    gate.set()
    await soon(first)
    threads.close()
    assert caught.value.code is Code.CANCELLED
    assert ran == []


@pytest.mark.parametrize(("size", "in_thread"), [(LARGE_BYTES, False), (LARGE_BYTES + 1, True)])
async def test_a_large_body_is_decoded_in_a_thread(size: int, *, in_thread: bool) -> None:
    threads = Threads("test", 1)
    here = threading.current_thread()

    def decode(body: bytes | bytearray | memoryview) -> tuple[int, bool]:
        return len(body), threading.current_thread() is not here

    assert await soon(decoded(threads, {}, decode, bytes(size))) == (size, in_thread)
    threads.close()


async def test_a_body_that_cannot_be_decoded_is_freed_without_garbage_collection() -> None:
    threads = Threads("test", 1)

    def fail(body: object) -> None:
        raise InferenceError(Code.INTERNAL, "no")

    async def decode(body: memoryview) -> None:
        with pytest.raises(InferenceError, match="no"):
            await off_loop(threads, {}, fail, body)

    with uncollected():
        body = memoryview(bytes(10))
        freed = weakref.ref(body)
        await decode(body)
        del body
        await asyncio.to_thread(wait_until, lambda: freed() is None, "the body is freed")
    threads.close()
