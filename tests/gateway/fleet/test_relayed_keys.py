"""Idempotency keys at routers that relay to one another."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet import relays
from gateway.fleet.relays import RelayCall
from gateway.fleet.routers import owner_of
from gateway.processes.channel import Channel
from tests.builders import soon
from tests.conformance.models import REPEAT, identity
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.relaying import (
    At,
    asked,
    begun,
    hosting,
    joined_at,
    key_of,
    relays_of,
    rest,
    two_routers,
    write_models,
)
from tests.serving import held, write_model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_models(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
async def routers(models: Path, tmp_path: Path) -> AsyncIterator[tuple[At, At]]:
    async with hosting(models) as place, two_routers(tmp_path, place) as found:
        yield found


@pytest.fixture
async def unequal(tmp_path: Path) -> AsyncIterator[tuple[At, At]]:
    """Two routers; only the second has version 2 of `repeat` and `holding`, and `extra`."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, versions in ((one, (1,)), (two, (2,))):
        write_model(folder, "repeat", REPEAT, versions=versions)
        write_model(folder, "holding", identity("BYTES", "1"), versions=versions)
    write_model(two, "extra", identity("BYTES", "1"))
    async with AsyncExitStack() as owner:
        places = [await owner.enter_async_context(hosting(each)) for each in (one, two)]
        yield await owner.enter_async_context(two_routers(tmp_path, *places))


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
    (known,) = second.others
    ids_known = ("0" * 16, known["id"], first.others[0]["id"])
    key = next(each for each in map(str, range(100)) if owner_of("", each, ids_known) == "0" * 16)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        relays_of(second).table.take("test", {"0" * 16: ("127.0.0.1", closed.getsockname()[1])})
        assert (await asked(second, "x", key)).status_code == 200
        assert (await asked(second, "x", key)).headers["idempotency-replayed"] == "true"


async def test_a_router_that_is_lost_before_its_answer_may_have_executed_the_request(
    routers: tuple[At, At], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = routers
    token, key = await begun(first, 1), key_of(first, second)

    class Lost(RelayCall):
        def __init__(self, channel: Channel, *rest: Any) -> None:
            super().__init__(channel, *rest)
            channel.abort()

    monkeypatch.setattr(relays, "RelayCall", Lost)
    assert (await rest(second, token, 0)).status_code == 404
    answer = await asked(second, "x", key)
    assert answer.status_code == 503
    assert "may have been executed" in answer.json()["error"]


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


async def test_a_request_has_the_version_that_its_own_router_has_chosen(
    unequal: tuple[At, At],
) -> None:
    first, second = unequal
    key = key_of(second, first)
    found = [await asked(at, "x", key, "infer") for at in (first, second)]
    assert [each.json()["model_version"] for each in found] == ["1", "1"]
    assert found[1].headers["idempotency-replayed"] == "true"


async def test_the_answer_of_a_version_that_is_not_here_is_passed_on(
    unequal: tuple[At, At],
) -> None:
    first, second = unequal
    key = key_of(second, first)
    found = [await asked(at, "x", key, "infer") for at in (second, first)]
    assert [each.json()["model_version"] for each in found] == ["2", "2"]
    assert found[1].headers["idempotency-replayed"] == "true"
    token = await begun(second, 1)
    resumed = await rest(first, token, 0)
    assert resumed.status_code == 200
    assert '"model_version":"2"' in resumed.text


async def test_a_key_whose_router_lacks_the_model_belongs_to_the_next_one(
    unequal: tuple[At, At],
) -> None:
    first, second = unequal
    key = key_of(first, second)
    found = [await asked(second, "x", key, "infer", model="extra") for _ in range(2)]
    assert [each.status_code for each in found] == [200, 200]
    assert found[1].headers["idempotency-replayed"] == "true"


async def test_a_request_that_was_made_with_a_version_is_not_repeated_with_another_one(
    unequal: tuple[At, At],
) -> None:
    first, second = unequal
    key = key_of(first, second)
    found = [await asked(at, "x", key, "infer") for at in (first, second)]
    assert [each.json()["model_version"] for each in found] == ["1", "1"]
    assert found[1].headers["idempotency-replayed"] == "true"


async def test_a_deadline_is_held_by_the_router_of_the_key(
    routers: tuple[At, At], models: Path
) -> None:
    first, second = routers
    headers = {"Idempotency-Key": key_of(first, second), "x-request-timeout-ms": "200"}
    with held(models, "holding"):
        posting = second.http.post(
            "/v2/models/holding/generate", json={"INPUT": "x"}, headers=headers
        )
        answer = await soon(posting)
        assert answer.status_code == 504
        assert answer.json() == {"error": "deadline exceeded after 0 tokens"}
        await until(lambda: not first.server.dataplane.in_flight)
    assert first.server.dataplane.admission is not None
    assert second.server.dataplane.admission is None


async def test_a_large_request_is_executed_where_it_came_and_keeps_its_key_there(
    routers: tuple[At, At], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = routers
    key, text = key_of(first, second), "x" * 300_000
    other = key_of(first, second, int(key) + 1)
    assert (await asked(second, text, key)).status_code == 200
    assert second.server.recordings.reading().recordings == 0
    monkeypatch.setattr(relays, "MOST_BYTES", len(text))
    found = [await asked(second, text + "y", other) for _ in range(2)]
    assert found[1].headers["idempotency-replayed"] == "true"
    assert second.server.recordings.reading().recordings == 1


async def test_a_request_whose_key_is_here_is_not_encoded(
    routers: tuple[At, At], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = routers
    monkeypatch.setattr(relays, "write_request", None)
    assert (await asked(second, "x", key_of(second, first))).status_code == 200
