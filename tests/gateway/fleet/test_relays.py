"""Resumable streams and idempotency keys at routers that relay to one another."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet.relays import RelayCall, Relays
from gateway.fleet.routers import owner_of
from gateway.policy.caller import Caller
from gateway.processes.channel import Channel
from gateway.resumption.reader import EventId, RecordingReader
from gateway.server import Server
from gateway.settings import FleetSettings, HttpSettings, ModelSettings, TlsSettings
from tests.builders import soon
from tests.certificates import Authority
from tests.conformance.models import HOLD, REPEAT, identity
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.in_one_loop import SETTINGS, running
from tests.serving import held, write_model

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


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "holding", identity("BYTES", "1", concurrency=0, **HOLD))
    write_model(folder, "silent", SILENT)
    write_model(folder, "failing", identity("BYTES", "1", fail="the model says no"))
    return folder


@asynccontextmanager
async def router(place: tuple[str, int], nothing: Path, **fleet: Any) -> AsyncIterator[At]:
    settings = replace(
        SETTINGS,
        models=ModelSettings(repositories=(nothing,)),
        fleet=FleetSettings(replicas=(place,), **{"port": 0, **fleet}),
        http=HttpSettings(address="127.0.0.1", port=0),
    )
    async with running(settings) as (server, ports):
        base = f"http://127.0.0.1:{ports['http']}"
        async with httpx.AsyncClient(base_url=base, timeout=20) as http:
            yield At(server, http, ports)


@pytest.fixture
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> TlsSettings | None:
    """The certificates of the fleet, if it has some."""
    if getattr(request, "param", None) is None:
        return None
    authority = Authority(tmp_path / "authority")
    own, root = authority.issue("own"), str(authority.root)
    files = {"cert": str(own.cert), "key": str(own.key), "root": root}
    return TlsSettings(wire="fleet", mutual=True, **files)


@pytest.fixture
async def place(models: Path, tls: TlsSettings | None) -> AsyncIterator[tuple[str, int]]:
    """The address of a replica."""
    fleet = FleetSettings(port=0, tls=tls)
    settings = replace(SETTINGS, models=ModelSettings(repositories=(models,)), fleet=fleet)
    async with running(settings) as (_, ports):
        yield "127.0.0.1", ports["fleet"]


@pytest.fixture
async def routers(
    place: tuple[str, int], tmp_path: Path, tls: TlsSettings | None
) -> AsyncIterator[tuple[At, At]]:
    """Two routers that know each other."""
    (nothing := tmp_path / "nothing").mkdir()
    async with (
        router(place, nothing, tls=tls) as first,
        router(place, nothing, tls=tls) as second,
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
            async for line in lines:
                count -= line.startswith("data: ")
                if not count:
                    break
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


def key_of(owner: At, other: At) -> str:
    """A key that a router has, and not the other one."""
    own, others = other.others[0]["id"], owner.others[0]["id"]
    return next(key for key in map(str, range(100)) if owner_of("", key, (own, others)) == own)


@pytest.mark.parametrize("tls", [None, "certificates"], indirect=True)
async def test_a_stream_is_resumed_at_another_router(routers: tuple[At, At]) -> None:
    first, second = routers
    token = await begun(first, 2)
    found = await rest(second, token, 2)
    assert found.status_code == 200
    assert ids(found) == [f"{token}.{number}" for number in range(3, 7)]
    assert found.headers["sluice-stream"] == token
    whole = await rest(first, token, 0)
    assert whole.text.endswith(found.text)
    assert (await rest(second, token, 0)).text == whole.text
    assert (await rest(second, token, 6)).status_code == 204
    late = await rest(second, token, 9)
    assert (late.status_code, late.text) == (400, (await rest(first, token, 9)).text)
    assert second.others[0]["relayed"] == 0


async def test_a_token_that_another_router_does_not_know_is_not_found(
    routers: tuple[At, At],
) -> None:
    first, second = routers
    token = await begun(first, 1)
    unknown = await rest(first, "x" * 38, 0)
    assert unknown.status_code == 404
    forged = token[:6] + "x" * 32
    elsewhere = STREAM.replace("repeat", "holding")
    for each in (await rest(second, forged, 0), await rest(second, token, 0, elsewhere)):
        assert (each.status_code, each.text) == (404, unknown.text)
    with pytest.raises(InferenceError, match="no such stream") as error:
        await resumed(second, token, 0, Caller(tenant="another"))
    assert error.value.code is Code.NOT_FOUND


async def test_tokens_of_unknown_routers_make_no_connections(routers: tuple[At, At]) -> None:
    _, second = routers
    for number in range(10_000):
        with pytest.raises(InferenceError, match="no such stream"):
            await second.server.recordings.resume_anywhere(
                EventId(f"{number:06}{'x' * 32}", 0), STREAM
            )
    assert channel_of(second) is None


async def test_a_router_that_cannot_be_reached_is_gone(
    routers: tuple[At, At], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = routers
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    fleet, http = first.server.settings.fleet, first.http.base_url.port
    assert fleet is not None
    strangers = free, fleet.replicas[0][1], http or 0, second.ports["fleet"]
    for number, each in enumerate(strangers):
        name = f"{number:016}"
        relays_of(first).table.take(name, {name: ("127.0.0.1", each)})
        for _ in range(2):
            assert (await rest(first, name[:6] + "x" * 32, 0)).status_code == 404
        relays_of(first).table.take(name, {})
    logged = [each for each in caplog.records if each.message == "router not reached"]
    assert len(logged) == len(strangers)


async def test_a_stream_whose_router_is_lost_ends_with_an_error(routers: tuple[At, At]) -> None:
    first, second = routers
    token = await begun(first, 2, n=100_000)
    async with second.http.stream("GET", STREAM, headers={"Last-Event-ID": f"{token}.2"}) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == f"id: {token}.3"
        channel = channel_of(second)
        assert channel is not None
        channel.abort()
        *_, last = [line async for line in lines if line]
    assert "was lost after response" in last
    assert last.startswith('data: {"error":"router ')


async def test_an_idle_or_slow_reader_holds_the_stream_back(routers: tuple[At, At]) -> None:
    first, second = routers
    token = await begun(first, 1, n=1_000_000, delay_us=500, text_input="x" * 5_000)
    limit = first.server.recordings.limit
    with await resumed(second, token, 1) as reader:
        assert await soon(reader.batch())
        await until(lambda: first.server.recordings.reading().byte_size > limit)
        received = reader.position
        for _ in range(20):
            batch = await soon(reader.batch())
            numbers = [event.number for event, _ in reader.numbered(batch)]
            assert numbers == list(range(received + 1, received + 1 + len(batch)))
            received = reader.position


async def test_a_caller_that_is_no_longer_valid_reads_no_more(routers: tuple[At, At]) -> None:
    first, second = routers
    path = "/v2/models/silent/generate_stream"
    token = await begun_at(first, path, ONE_THEN_SILENT, 1)
    caller = Caller()
    with await resumed(second, token, 1, caller, path) as reader:
        waiting = asyncio.create_task(reader.batch())
        await asyncio.sleep(0)
        caller.valid = False
        second.server.recordings.end_invalid()
        with pytest.raises(InferenceError, match="no longer valid"):
            await soon(waiting)
        assert second.others[0]["relayed"] == 1
    assert second.others[0]["relayed"] == 0
    assert first.server.recordings.reading().recordings == 1


async def test_a_router_that_drains_completes_relayed_streams(
    place: tuple[str, int], tmp_path: Path
) -> None:
    (nothing := tmp_path / "nothing").mkdir()
    lasting = {"n": 40, "delay_us": 10_000}
    async with router(place, nothing) as second, httpx.AsyncClient() as client:
        async with router(place, nothing) as first:
            await until(lambda: bool(first.others and second.others))
            token, own = await begun(first, 1, **lasting), await begun(second, 1, **lasting)
            url = f"{first.http.base_url}{STREAM}"
            reading = [
                asyncio.create_task(rest(second, token, 1)),
                asyncio.create_task(client.get(url, headers={"Last-Event-ID": f"{own}.1"})),
            ]
            await until(lambda: bool(first.others[0]["relayed"] and second.others[0]["relayed"]))
        found = [ids(await each)[-1] for each in reading]
        assert found == [f"{token}.40", f"{own}.40"]
        await until(lambda: not second.others)
        assert (await rest(second, token, 1)).status_code == 404


async def test_a_key_is_executed_once_at_all_routers(routers: tuple[At, At], models: Path) -> None:
    joined = 0
    for path in ("generate", "infer"):
        with held(models, "holding"):
            posts = [asyncio.create_task(asked(at, "x", f"a {path}", path)) for at in routers * 2]
            joined += 3
            await until(lambda wanted=joined: joined_at(*routers) == wanted)
        found = [await each for each in posts]
        found += [await asked(at, "x", f"a {path}", path) for at in routers]
        assert {(each.status_code, each.content) for each in found} == {(200, found[0].content)}
        replayed = sorted(each.headers.get("idempotency-replayed", "") for each in found)
        assert replayed == ["", *["true"] * 5]
        joined += 2
        for at in routers:
            other = await asked(at, "y", f"a {path}", path)
            assert other.status_code == 422


async def test_a_failed_request_leaves_its_key_at_all_routers(routers: tuple[At, At]) -> None:
    first, second = routers
    key = key_of(first, second)
    for at in routers:
        failed = await asked(at, "x", key, "infer", model="failing")
        assert failed.status_code == 500
        assert "the model says no" in failed.json()["error"]
        assert "idempotency-replayed" not in failed.headers
    assert (await asked(second, "x", key)).status_code == 200


async def test_a_key_of_a_router_that_is_gone_belongs_to_another_one(
    routers: tuple[At, At],
) -> None:
    first, second = routers
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    (known,) = second.others
    relays_of(second).table.take("test", {"0" * 16: ("127.0.0.1", free)})
    ids_known = ("0" * 16, known["id"], first.others[0]["id"])
    key = next(each for each in map(str, range(100)) if owner_of("", each, ids_known) == "0" * 16)
    assert (await asked(second, "x", key)).status_code == 200
    assert (await asked(second, "x", key)).headers["idempotency-replayed"] == "true"


async def test_a_router_that_is_lost_before_its_answer_may_have_executed_the_request(
    routers: tuple[At, At], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = routers
    token, key = await begun(first, 1), key_of(first, second)
    monkeypatch.setattr(RelayCall, "_send_request", lambda call, _: call._channel.abort())  # noqa: SLF001
    assert (await rest(second, token, 0)).status_code == 404
    answer = await asked(second, "x", key)
    assert answer.status_code == 503
    assert "may have been executed" in answer.json()["error"]


async def test_routers_without_a_port_are_not_known(place: tuple[str, int], tmp_path: Path) -> None:
    (nothing := tmp_path / "nothing").mkdir()
    async with router(place, nothing) as first, router(place, nothing, port=None) as second:
        token = await begun(first, 1)
        assert (await rest(second, token, 1)).status_code == 404
        assert (first.others, second.others) == ([], [])
        own = await begun(second, 1)
        assert len(own) == 32
        assert (await rest(first, own, 1)).status_code == 404


async def test_a_router_that_drains_takes_no_more_calls(routers: tuple[At, At]) -> None:
    first, second = routers
    token, key = await begun(first, 1), key_of(first, second)
    first.server.dataplane.refuse_requests()
    assert (await asked(second, "x", key)).status_code == 200
    assert second.server.recordings.reading().recordings == 1
    assert (await rest(second, token, 0)).status_code == 404


async def test_a_key_that_this_router_has_executed_stays_here(routers: tuple[At, At]) -> None:
    first, second = routers
    key, table = key_of(first, second), relays_of(second).table
    assert second.server.settings.fleet is not None
    (replica,) = second.server.settings.fleet.replicas
    places = {second.others[0]["id"]: ("127.0.0.1", first.ports["fleet"])}
    table.take(replica, {})
    assert "idempotency-replayed" not in (await asked(second, "x", key)).headers
    table.take(replica, places)
    assert (await asked(second, "x", key)).headers["idempotency-replayed"] == "true"
