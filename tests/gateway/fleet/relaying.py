"""Routers of a test that relay to one another, and requests at them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from gateway.fleet.handshake import FleetRole, Identity
from gateway.fleet.reaching import FleetAddress
from gateway.fleet.relays import Relays
from gateway.fleet.routers import owner_of
from gateway.policy.caller import Caller
from gateway.processes.channel import Channel, Frame
from gateway.resumption.reader import EventId, RecordingReader
from gateway.server import Server
from gateway.settings import FleetSettings, HttpSettings, ModelSettings, TlsSettings
from tests.builders import soon
from tests.conformance.models import DECOUPLED, HOLD, REPEAT, identity
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.in_one_loop import SETTINGS, running
from tests.serving import write_model

STREAM = "/v2/models/repeat/generate_stream"
ASK = {"text_input": "x", "n": 6, "delay_us": 2_000, "resumable": True}
SILENT = """
backend: "repeat"
model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [-1] },
        { name: "DELAY" data_type: TYPE_UINT32 dims: [-1] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [1] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [1] },
         { name: "IDX" data_type: TYPE_UINT32 dims: [1] } ]
"""
"""A response after each delay, in milliseconds."""
ASK_TWO = {"INPUT": "x", "resumable": True}
HELD_TWO = {"INPUT": "x", "resumable": True}
ONE_THEN_SILENT = {"IN": [1, 2], "DELAY": [0, 60_000], "WAIT": 0, "resumable": True}


class At(NamedTuple):
    """A router, its ports, and a client of it."""

    server: Server
    http: httpx.AsyncClient
    ports: Mapping[str, int]

    @property
    def others(self) -> list[dict[str, Any]]:
        """The other routers that it knows."""
        assert self.server.dataplane.fleet is not None
        found: list[dict[str, Any]] = self.server.dataplane.fleet.describe()["routers"]
        return found


def write_models(folder: Path) -> None:
    """The models of a replica."""
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "holding", identity("BYTES", "1", concurrency=0, **HOLD))
    write_model(
        folder, "two", identity("BYTES", "1", responses=2, concurrency=0, **HOLD) + DECOUPLED
    )
    write_model(folder, "silent", SILENT)
    write_model(folder, "failing", identity("BYTES", "1", fail="the model says no"))


@asynccontextmanager
async def hosting(folder: Path, tls: TlsSettings | None = None) -> AsyncIterator[tuple[str, int]]:
    """The address of a replica of a repository."""
    fleet = FleetSettings(port=0, tls=tls)
    settings = replace(SETTINGS, models=ModelSettings(repositories=(folder,)), fleet=fleet)
    async with running(settings) as (_, ports):
        yield "127.0.0.1", ports["fleet"]


@asynccontextmanager
async def router(
    nothing: Path, *places: tuple[str, int], exit_timeout_secs: float = 5.0, **fleet: Any
) -> AsyncIterator[At]:
    """A router of the replicas at these places; `nothing` is an empty repository."""
    settings = replace(
        SETTINGS,
        exit_timeout_secs=exit_timeout_secs,
        models=ModelSettings(repositories=(nothing,)),
        fleet=FleetSettings(replicas=places, **{"port": 0, **fleet}),
        http=HttpSettings(address="127.0.0.1", port=0, first_response_secs=0.1),
    )
    async with running(settings) as (server, ports):
        base = f"http://127.0.0.1:{ports['http']}"
        async with httpx.AsyncClient(base_url=base, timeout=20) as http:
            yield At(server, http, ports)


@asynccontextmanager
async def two_routers(
    folder: Path, place: tuple[str, int], *of_second: tuple[str, int], **fleet: Any
) -> AsyncIterator[tuple[At, At]]:
    """Two routers that know each other, of the replica at a place; the second has more of them."""
    (nothing := folder / "nothing").mkdir()
    async with (
        router(nothing, place, **fleet) as first,
        router(nothing, place, *of_second, **fleet) as second,
    ):
        await until(lambda: bool(first.others and second.others))
        yield first, second


async def begun(at: At, count: int, **members: Any) -> str:
    """The token of a stream whose client disconnects after some events."""
    return await begun_at(at, STREAM, {**ASK, **members}, count)


async def begun_at(at: At, path: str, body: Mapping[str, Any], count: int) -> str:
    async with at.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async with aclosing(answer.aiter_lines()) as lines:
            while count:
                count -= (await anext(lines)).startswith("data: ")
    return str(answer.headers["sluice-stream"])


async def rest(at: At, token: str, number: int, path: str = STREAM) -> httpx.Response:
    return await soon(at.http.get(path, headers={"Last-Event-ID": f"{token}.{number}"}))


def ids(answer: httpx.Response) -> list[str]:
    lines = answer.text.splitlines()
    return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]


async def resumed(
    at: At, token: str, number: int, caller: Caller | None = None, path: str = STREAM
) -> RecordingReader:
    event = EventId(token, number)
    return await soon(at.server.recordings.resume_anywhere(event, path, caller))


async def asked(
    at: At, text: str, key: str, path: str = "generate", model: str = "holding"
) -> httpx.Response:
    """The answer to a request with an idempotency key."""
    body: dict[str, Any] = {"INPUT": text}
    if path == "infer":
        tensor = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": [text]}
        body = {"id": "7", "inputs": [tensor]}
    headers = {"Idempotency-Key": key}
    return await soon(at.http.post(f"/v2/models/{model}/{path}", json=body, headers=headers))


def relays_of(at: At) -> Relays:
    found = at.server.recordings.elsewhere
    assert isinstance(found, Relays)
    return found


def channel_of(at: At) -> Channel | None:
    """The connection of a router to the other one."""
    (peer,) = relays_of(at)._peers.values()  # noqa: SLF001 - the other end of a socket
    return peer._channel  # noqa: SLF001


def joined_at(*routers: At) -> int:
    """The requests that have joined an earlier one with their key."""
    return sum(at.server.recordings.reading().joined for at in routers)


def key_of(owner: At, other: At, first: int = 0) -> str:
    """A key that a router has, and not the other one; a number of at least `first`."""
    own, others = other.others[0]["id"], owner.others[0]["id"]
    return next(
        key for key in map(str, range(first, 100)) if owner_of("", key, (own, others)) == own
    )


def calling(port: int, role: FleetRole = FleetRole.CALLING) -> FleetAddress:
    """The port of a router, as another one calls it."""
    return FleetAddress("127.0.0.1", port, Identity("sluice", role), None)


async def called(port: int, frames: list[Frame]) -> Channel:
    """A connection to a router, whose frames are added to a list."""
    channels: list[Channel] = []
    await soon(calling(port).reach(lambda channel, _: channels.append(channel), frames.append))
    (channel,) = channels
    return channel
