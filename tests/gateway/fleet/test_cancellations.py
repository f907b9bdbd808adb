"""Requests that are cancelled by their ids at another router of their fleet."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet import cancellations
from gateway.fleet.cancellations import encode
from gateway.fleet.handshake import FleetKind
from gateway.fleet.relay_port import RelayLink
from gateway.policy.caller import Caller
from gateway.processes.channel import Frame
from gateway.processes.error_messages import read_error
from gateway.processes.inference_calls import InferenceKind
from gateway.request_name import RequestName
from tests.builders import soon
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.relaying import (
    STREAM,
    At,
    asked,
    called,
    channel_of,
    hosting,
    key_of,
    two_routers,
    write_models,
)
from tests.serving import held

ENDLESS = {"text_input": "x", "n": 100_000, "delay_us": 2_000}
OTHERS = {"id": "b"}, {"id": "a", "version": "2"}, {"id": "a", "model": "holding"}
"""Names of no request."""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_models(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
async def routers(models: Path, tmp_path: Path) -> AsyncIterator[tuple[At, At]]:
    async with hosting(models) as place, two_routers(tmp_path, place) as found:
        yield found


@asynccontextmanager
async def streaming(at: At, request_id: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events of an endless stream, which has begun."""
    body = {**ENDLESS, "id": request_id}
    async with at.http.stream("POST", STREAM, json=body) as answer:
        lines = answer.aiter_lines()
        events = (json.loads(each[6:]) async for each in lines if each.startswith("data: "))
        await soon(anext(events))
        yield events


async def last(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [each async for each in events][-1]


async def cancel(
    at: At, request_id: str, model: str = "repeat", version: str = ""
) -> tuple[int, str]:
    """Status and text of a cancellation."""
    versions = f"/versions/{version}" if version else ""
    path = f"/v2/models/{model}{versions}/requests/{request_id}/cancel"
    answer = await soon(at.http.post(path))
    return answer.status_code, answer.text


async def test_a_request_is_cancelled_at_another_router_and_no_other_one_is(
    routers: tuple[At, At],
) -> None:
    first, second = routers
    async with streaming(first, "a") as events, streaming(first, "c") as others:
        assert await cancel(second, "a") == (200, "{}")
        assert (await soon(last(events)))["cancelled"] is True
        unknown = 404, "{\"error\":\"model 'repeat' runs no request with the id 'a'\"}"
        assert await cancel(second, "a") == unknown == await cancel(first, "a")
        assert "cancelled" not in await soon(anext(others))
    assert second.others[0]["relayed"] == 0


async def test_all_requests_of_an_id_at_the_other_router_are_cancelled(
    routers: tuple[At, At],
) -> None:
    first, second = routers
    async with streaming(first, "a") as one, streaming(first, "a") as two:
        assert (await cancel(second, "a", version="1"))[0] == 200
        for each in (one, two):
            assert (await soon(last(each)))["cancelled"] is True


async def test_a_router_with_a_request_of_that_id_asks_no_other_one(
    routers: tuple[At, At],
) -> None:
    first, second = routers
    async with streaming(first, "a") as there, streaming(second, "a") as here:
        assert (await cancel(second, "a"))[0] == 200
        assert (await soon(last(here)))["cancelled"] is True
        assert "cancelled" not in await soon(anext(there))
        assert channel_of(second) is None


@pytest.mark.parametrize("name", OTHERS, ids=["id", "version", "model"])
async def test_another_name_cancels_nothing(routers: tuple[At, At], name: dict[str, str]) -> None:
    first, second = routers
    async with streaming(first, "a") as events:
        members = {"model": "repeat", **name}
        here = await cancel(first, members["id"], members["model"], members.get("version", ""))
        there = await cancel(second, members["id"], members["model"], members.get("version", ""))
        assert there == here
        assert there[0] in (400, 404)
        assert "cancelled" not in await soon(anext(events))


async def test_a_caller_cancels_no_request_of_another_tenant_or_of_a_model_it_does_not_see(
    routers: tuple[At, At],
) -> None:
    first, second = routers
    running = second.server.dataplane.running
    async with streaming(first, "a") as events:
        stranger, blind = Caller(tenant="another"), Caller(models=re.compile("holding"))
        for caller in (stranger, blind):
            name = RequestName("repeat", "", "a", caller.tenant)
            with pytest.raises(InferenceError) as error:
                await soon(running.cancel_anywhere(name, caller=caller))
            assert error.value.code is Code.NOT_FOUND
        late = RequestName("repeat", "", "a")
        with pytest.raises(InferenceError, match="runs no request"):
            await soon(running.cancel_anywhere(late, only_own=True))
        assert "cancelled" not in await soon(anext(events))


async def test_a_request_with_a_key_is_cancelled_at_the_router_that_received_it(
    routers: tuple[At, At], models: Path
) -> None:
    first, second = routers
    key = key_of(first, second)
    with held(models, "holding"):
        answer = asyncio.ensure_future(asked(second, "x", key, "infer"))
        await until(lambda: first.server.recordings.reading().recordings == 1)
        assert (await cancel(second, "7", "holding"))[0] == 200
        assert "cancelled" in (await soon(answer)).text


async def test_a_router_that_does_not_answer_or_is_gone_cancels_nothing(
    routers: tuple[At, At], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = routers
    async with streaming(first, "a") as events:
        with monkeypatch.context() as patch:
            patch.setattr(cancellations, "CANCEL_SECS", 0.1)
            patch.setattr(RelayLink, "hear", lambda *_: None)  # an earlier release
            assert (await cancel(second, "a"))[0] == 404
            patch.setattr(cancellations, "CANCEL_SECS", 60.0)
            patch.setattr(RelayLink, "hear", lambda link, _: link.close())
            assert (await cancel(second, "a"))[0] == 404
        assert "cancelled" not in await soon(anext(events))
        assert (await cancel(second, "a"))[0] == 200
    assert second.others[0]["relayed"] == 0


async def test_a_name_that_cannot_be_read_ends_its_call_with_an_error_and_others_continue(
    routers: tuple[At, At],
) -> None:
    first, _ = routers
    frames: list[Frame] = []
    channel = await called(first.ports["fleet"], frames)
    async with streaming(first, "a") as events:
        for call, payload in enumerate((b"", encode(("repeat", "", 7, "")), encode(("a",))), 1):
            channel.send(FleetKind.CANCEL, call, payload)
        channel.send(FleetKind.CANCEL, 4, encode(RequestName("repeat", "", "")))
        channel.send(FleetKind.CANCEL, 5, encode(RequestName("repeat", "2", "a")))
        channel.send(FleetKind.CANCEL, 6, encode(RequestName("repeat", "1", "a")))
        await until(lambda: len(frames) == 6)
        assert (await soon(last(events)))["cancelled"] is True
    channel.abort()
    assert [each.kind for each in frames[:3]] == [InferenceKind.REFUSED] * 3
    assert {read_error(each.payload).code for each in frames[:3]} == {Code.INVALID_ARG}
    assert frames[3:] == [
        Frame(FleetKind.CANCELLED, 4, encode(False)),
        Frame(FleetKind.CANCELLED, 5, encode(False)),
        Frame(FleetKind.CANCELLED, 6, encode(True)),
    ]
