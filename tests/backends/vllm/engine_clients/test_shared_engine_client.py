"""A client as the server sees it: what it says besides answers, and its end."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

import orjson
import pytest

from backends.vllm.engine_clients import shared_engine
from backends.vllm.engine_clients.messages import ClientKind, Offer, write
from backends.vllm.engine_clients.shared_engine import ClientProcess, RemoteClient
from gateway.errors import Code, InferenceError
from gateway.processes.channel import NO_CALL, Channel, Frame, number
from gateway.processes.error_messages import write_error
from tests.builders import soon, text_request


class Process(ClientProcess):
    """No process: the test is the other end of its connection."""

    def __init__(self) -> None:
        self.index = 3
        self.settings = b"settings"
        self.connection, self.theirs = socket.socketpair()
        self.killed = asyncio.Event()

    @property
    def exit_text(self) -> str:
        return " (exit code -9)"

    def kill(self) -> None:
        self.killed.set()


class Situation:
    """A client, its other end, and what the server learns."""

    def __init__(self) -> None:
        self.process = Process()
        self.heard: asyncio.Queue[Frame] = asyncio.Queue()
        self.far = Channel(self.heard.put_nowait)
        self.wasted: asyncio.Queue[int] = asyncio.Queue()
        self.stopped: asyncio.Queue[str] = asyncio.Queue()
        self.client = RemoteClient(
            "llama", self.process, self.wasted.put_nowait, self.stopped.put_nowait
        )

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.far, sock=self.process.theirs)

    async def offered(self) -> Offer:
        """Have the client be ready."""
        offering = asyncio.create_task(self.client.offer())
        assert (await soon(self.heard.get())).payload == b"settings"
        self.far.send(ClientKind.READY, NO_CALL, write(Offer(("pirate",), 512, 64)))
        return await soon(offering)


@pytest.fixture
async def situation() -> AsyncIterator[Situation]:
    found = Situation()
    await found.connect()
    yield found
    found.client.close()
    found.far.close()
    await soon(found.far.lost())


async def test_a_client_that_is_ready_says_what_it_offers(situation: Situation) -> None:
    assert await situation.offered() == Offer(("pirate",), 512, 64)


async def test_a_client_that_cannot_serve_says_why(situation: Situation) -> None:
    offering = asyncio.create_task(situation.client.offer())
    error = InferenceError(Code.INVALID_ARG, "no such template")
    situation.far.send(ClientKind.FAILED, NO_CALL, write_error(error))
    with pytest.raises(InferenceError, match="no such template") as caught:
        await soon(offering)
    assert caught.value.code is Code.INVALID_ARG


async def test_a_client_that_ends_before_it_is_ready_fails_the_model(situation: Situation) -> None:
    offering = asyncio.create_task(situation.client.offer())
    situation.far.close()
    with pytest.raises(InferenceError) as caught:
        await soon(offering)
    assert caught.value.message == (
        "model 'llama': client 3 of its engine ended (exit code -9); the log says more"
    )


async def test_closing_a_client_cancels_the_wait_for_it(situation: Situation) -> None:
    offering = asyncio.create_task(situation.client.offer())
    await soon(situation.heard.get())
    situation.client.close()
    with pytest.raises(asyncio.CancelledError):
        await soon(offering)


async def test_the_end_of_a_client_is_reported_with_its_exit_code(situation: Situation) -> None:
    await situation.offered()
    situation.far.close()
    assert await soon(situation.stopped.get()) == "client 3 of its engine ended (exit code -9)"


async def test_the_reason_that_a_client_sends_is_reported(situation: Situation) -> None:
    await situation.offered()
    situation.far.send(ClientKind.STOPPED, NO_CALL, b"its engine has stopped")
    assert await soon(situation.stopped.get()) == "its engine has stopped"


async def test_a_closed_client_reports_nothing(situation: Situation) -> None:
    await situation.offered()
    situation.client.close()
    await soon(situation.far.lost())
    await asyncio.sleep(2 * shared_engine.EXIT_STATUS_SECS)
    assert situation.stopped.empty()


async def test_wasted_tokens_and_lines_of_the_log_come_through(
    situation: Situation, caplog: pytest.LogCaptureFixture
) -> None:
    await situation.offered()
    line = {"name": "sluice.vllm", "levelno": logging.WARNING, "msg": "a line"}
    situation.far.send(ClientKind.LOG, NO_CALL, orjson.dumps(line))
    situation.far.send(ClientKind.WASTED, NO_CALL, number(7))
    assert await soon(situation.wasted.get()) == 7
    assert "a line" in caplog.text


async def test_calls_are_counted_until_they_return(situation: Situation) -> None:
    await situation.offered()
    first, second = (situation.client.call(text_request()) for _ in range(2))
    assert situation.client.calls == 2
    for call in (first, second):
        situation.client.returned(call)
    assert situation.client.calls == 0
    kinds = [(await soon(situation.heard.get())).kind for _ in range(4)]
    assert kinds == [ClientKind.REQUEST, ClientKind.REQUEST, ClientKind.GONE, ClientKind.GONE]


async def test_a_request_that_cannot_be_written_is_no_call(situation: Situation) -> None:
    await situation.offered()
    with pytest.raises(InferenceError, match="cannot be read"):
        situation.client.call(text_request(parameters={"seed": 1 << 70}))
    assert situation.client.calls == 0


async def test_a_client_that_answers_is_left_alone_and_one_that_hangs_is_killed(
    situation: Situation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_engine, "ANSWER_TIMEOUT_SECS", 0.05)
    await situation.offered()
    for _ in range(3):
        assert (await soon(situation.heard.get())).kind == ClientKind.PING
        situation.far.send(ClientKind.PONG)
    assert not situation.process.killed.is_set()
    await soon(situation.process.killed.wait())
