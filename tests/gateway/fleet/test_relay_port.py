"""The port of a router for other routers: strangers, and calls that cannot be read."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet import reaching
from gateway.fleet.handshake import FleetKind, FleetRole, HandshakeError
from gateway.fleet.relays import Relay, Relayed, RelayedRecording, encode
from gateway.messages import InferRequest, InferResponse
from gateway.processes.channel import Channel, Frame, packed
from gateway.processes.error_messages import read_error
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import write_request, write_response
from gateway.stream import INTERRUPTED
from tests.builders import soon, text_response
from tests.gateway.fleet.fake_replica import FakeReplica, listening, until
from tests.gateway.fleet.relaying import called, calling, router

TOKEN = Relay("place", write_request(InferRequest(model="")), token="x" * 38)
KEY = Relay("place", write_request(InferRequest(model="none")), key="a", fingerprint=b"b" * 32)


ANSWER = encode(Relayed("token", "1", write_request(InferRequest(model="text"))))


class Call:
    """A call to another router, whose frames the test makes."""

    def __init__(self) -> None:
        self.channel = Channel(lambda _: None)
        self.peer: Any = SimpleNamespace(id="a" * 16, numbers=iter((7,)), calls=0)
        self.ends: list[None] = []
        end = partial(self.ends.append, None)
        self.recording = RelayedRecording(self.peer, self.channel, TOKEN, end)

    def receive(self, kind: int, payload: bytes = b"") -> None:
        self.channel.data_received(packed(kind, 7, payload))


async def test_a_final_response_ends_the_recording_also_before_the_end_of_the_call() -> None:
    call = Call()
    call.receive(FleetKind.RELAYED, ANSWER)
    assert (await soon(call.recording.answered())).token == call.recording.token == "token"
    call.receive(InferenceKind.DATA, write_response(text_response("a")))
    assert len(call.recording.after(0)) == call.recording.last == 1
    assert not call.recording.over
    call.receive(InferenceKind.DATA, write_response(InferResponse(final=True)))
    assert len(call.recording.after(1)) == 1
    assert call.recording.over
    call.recording.leave()
    call.recording.leave()
    assert (call.peer.calls, len(call.ends)) == (0, 1)


async def test_the_last_response_of_a_cancelled_request_is_known_as_that() -> None:
    call = Call()
    call.receive(FleetKind.RELAYED, ANSWER)
    call.receive(InferenceKind.DATA, write_response(INTERRUPTED))
    assert call.recording.after(0)[0] is INTERRUPTED
    assert not call.recording.interrupt()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (InferenceKind.DATA, write_response(InferResponse(final=True))),
        (FleetKind.RELAYED, b"x"),
        (InferenceKind.ABORT, b""),
    ],
    ids=["response", "answer", "abort"],
)
async def test_a_router_that_breaks_the_protocol_fails_the_call(kind: int, payload: bytes) -> None:
    call = Call()
    call.receive(kind, payload)
    with pytest.raises(InferenceError) as error:
        await soon(call.recording.answered())
    assert error.value.code is Code.INTERNAL


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with listening() as found:
        yield found


@pytest.fixture
async def port(replica: FakeReplica, tmp_path: Path) -> AsyncIterator[int]:
    """The port of a router."""
    async with router(tmp_path, ("127.0.0.1", replica.port)) as found:
        yield found.ports["fleet"]


async def test_only_other_routers_agree_with_a_router(
    port: int, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("they have agreed")

    for role in (FleetRole.ROUTER, FleetRole.REPLICA, FleetRole.CALLED):
        with pytest.raises(HandshakeError, match="refused by the other end: found a"):
            await soon(calling(port, role).reach(never, never))
    with pytest.raises(HandshakeError, match="found a connection of large tensors"):
        await soon(calling(port).reach(never, never, link="1" * 64))
    monkeypatch.setattr(reaching, "HANDSHAKE_SECS", 0.5)  # the replica does not answer
    with pytest.raises((HandshakeError, TimeoutError)):
        await soon(calling(replica.port).reach(never, never))


@pytest.mark.parametrize(
    ("payload", "code", "text"),
    [
        (b"", Code.INVALID_ARG, "the call of another router cannot be read"),
        (encode(TOKEN)[:-3], Code.INVALID_ARG, "the call of another router cannot be read"),
        (encode(("place", b"x")), Code.INTERNAL, ""),
        (encode(TOKEN), Code.NOT_FOUND, "there is no such stream"),
    ],
    ids=["empty", "cut", "request", "token"],
)
async def test_a_call_that_fails_ends_with_its_error_and_others_continue(
    port: int, payload: bytes, code: Code, text: str
) -> None:
    frames: list[Frame] = []
    channel = await called(port, frames)
    channel.send(InferenceKind.DATA, 7, b"of no call")
    channel.send(FleetKind.INTERRUPT, 7)
    for call in (1, 2):
        channel.send(FleetKind.RELAY, call, payload)
    channel.send(FleetKind.PING)
    await until(lambda: len(frames) == 3)
    channel.abort()
    errors = {each.call: each for each in frames if each.kind == InferenceKind.REFUSED}
    assert set(errors) == {1, 2}
    for each in errors.values():
        error = read_error(each.payload)
        assert error.code is code
        assert text in error.message
    assert {each.kind for each in frames if not each.call} == {FleetKind.PONG}


async def test_a_request_of_a_model_that_is_not_here_ends_without_an_answer(port: int) -> None:
    frames: list[Frame] = []
    channel = await called(port, frames)
    channel.send(FleetKind.RELAY, 1, encode(KEY))
    await until(lambda: bool(frames))
    channel.abort()
    assert frames == [Frame(InferenceKind.END, 1, b"")]
