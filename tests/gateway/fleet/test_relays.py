"""Resumable streams at routers that relay to one another."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet import peers, relays
from gateway.fleet.relay_port import RelayLink
from gateway.policy.caller import Caller
from gateway.resumption.reader import EventId
from gateway.settings import TlsSettings
from tests.builders import soon
from tests.certificates import Authority
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.relaying import (
    HELD_TWO,
    ONE_THEN_SILENT,
    STREAM,
    At,
    asked,
    begun,
    begun_at,
    channel_of,
    hosting,
    ids,
    key_of,
    relays_of,
    rest,
    resumed,
    router,
    two_routers,
    write_models,
)
from tests.serving import held


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_models(tmp_path / "models")
    return tmp_path / "models"


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
    async with hosting(models, tls) as found:
        yield found


@pytest.fixture
async def routers(
    place: tuple[str, int], tmp_path: Path, tls: TlsSettings | None
) -> AsyncIterator[tuple[At, At]]:
    async with two_routers(tmp_path, place, tls=tls) as found:
        yield found


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
    fleet, http = first.server.settings.fleet, first.http.base_url.port
    assert fleet is not None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        unused: int = closed.getsockname()[1]
        strangers = unused, fleet.replicas[0][1], http or 0, second.ports["fleet"]
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
    models: Path, place: tuple[str, int], tmp_path: Path
) -> None:
    (nothing := tmp_path / "nothing").mkdir()
    path = "/v2/models/two/generate_stream"
    async with router(nothing, place) as second, httpx.AsyncClient(timeout=20) as client:
        async with router(nothing, place) as first:
            await until(lambda: bool(first.others and second.others))
            with held(models, "two"):
                token, own = [await begun_at(at, path, HELD_TWO, 0) for at in (first, second)]
                headers, url = {"Last-Event-ID": f"{own}.0"}, f"{first.http.base_url}{path}"
                reading = [
                    asyncio.create_task(rest(second, token, 0, path)),
                    asyncio.create_task(client.get(url, headers=headers)),
                ]
                for at in (first, second):
                    await until(lambda at=at: at.server.recordings.reading().resumed == 1)
                first.server.stop()
                await until(lambda: first.server.dataplane.exiting)
        found = [ids(await each) for each in reading]
        assert found == [[f"{each}.1", f"{each}.2"] for each in (token, own)]
        await until(lambda: not second.others)
        assert (await rest(second, token, 0, path)).status_code == 404


async def test_a_relayed_stream_at_the_limit_of_a_drain_ends_with_the_error_of_a_shutdown(
    place: tuple[str, int], tmp_path: Path
) -> None:
    (nothing := tmp_path / "nothing").mkdir()
    path = "/v2/models/silent/generate_stream"
    async with router(nothing, place) as first, httpx.AsyncClient(timeout=20) as client:
        async with router(nothing, place, exit_timeout_secs=0.1) as second:
            await until(lambda: bool(first.others and second.others))
            token = await begun_at(first, path, ONE_THEN_SILENT, 1)
            headers, url = {"Last-Event-ID": f"{token}.0"}, f"{second.http.base_url}{path}"
            reading = asyncio.create_task(client.get(url, headers=headers))
            await until(lambda: first.server.recordings.reading().resumed == 1)
        *_, last = [line for line in (await reading).text.splitlines() if line]
        assert "the server is shutting down" in last


async def test_a_drain_waits_for_a_call_that_is_still_connecting(routers: tuple[At, At]) -> None:
    _, second = routers
    writers: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    name, (place,) = "f" * 16, [each.getsockname() for each in listener.sockets]
    relays_of(second).table.take("test", {name: place})
    calling = asyncio.create_task(rest(second, name[:6] + "x" * 32, 0))
    await until(lambda: bool(writers))
    ended = asyncio.create_task(second.server.recordings.read_elsewhere())
    await asyncio.sleep(0)
    assert not ended.done()
    writers[0].transport.abort()
    assert (await calling).status_code == 404
    await soon(ended)
    listener.close()


async def test_a_router_of_which_one_address_is_silent_is_reached_at_another_one(
    routers: tuple[At, At],
) -> None:
    first, second = routers
    token = await begun(first, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ((name, peer),) = relays_of(second)._peers.items()  # noqa: SLF001 - tables have two hosts
        relays_of(second).table.take("test", {name: silent.getsockname()})
        peer.places = peer.places[::-1]
        assert (await rest(second, token, 0)).status_code == 200


async def test_many_silent_addresses_of_a_router_take_no_longer_than_one(
    routers: tuple[At, At], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = routers
    monkeypatch.setattr(peers, "REACH_SECS", 0.5)
    name = "f" * 16
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        at = relays_of(second)
        at.table.take("test", {name: silent.getsockname()})
        at._peers[name].places *= 100  # noqa: SLF001 - each is another port
        assert (await rest(second, name[:6] + "x" * 32, 0)).status_code == 404


async def test_a_router_that_does_not_answer_in_time_is_lost(
    routers: tuple[At, At], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = routers
    token = await begun(first, 1)
    monkeypatch.setattr(RelayLink, "hear", lambda *_: None)
    monkeypatch.setattr(relays, "ANSWER_SECS", 0.05)
    assert (await rest(second, token, 0)).status_code == 404
    answer = await asked(second, "x", key_of(first, second))
    assert answer.status_code == 503
    assert "may have been executed" in answer.json()["error"]


async def test_routers_without_a_port_are_not_known(place: tuple[str, int], tmp_path: Path) -> None:
    (nothing := tmp_path / "nothing").mkdir()
    async with router(nothing, place) as first, router(nothing, place, port=None) as second:
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
