"""A replica that announces nonsense, and another one of the same model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.builders import TEXT, soon, text_request
from tests.gateway.fleet.fake_replica import NO_OFFERS, FakeReplica, listening, offered, until
from tests.gateway.fleet.routing import Routed, answered, routing, sums, text
from tests.gateway.fleet.test_connection import NONSENSE

USUAL = {name: frame for name, frame in NONSENSE.items() if name != "too many keys"}
"""Those that are nonsense with the usual limit of keys, too."""


@pytest.fixture
async def first() -> AsyncIterator[FakeReplica]:
    async with listening() as found:
        found.offer(offered(TEXT))
        yield found


@pytest.fixture
async def second() -> AsyncIterator[FakeReplica]:
    async with listening() as found:
        found.offer(offered(TEXT))
        yield found


@pytest.fixture
async def router(first: FakeReplica, second: FakeReplica, tmp_path: Path) -> AsyncIterator[Routed]:
    async with routing(tmp_path, first, second) as found:
        yield found


@pytest.mark.parametrize(("kind", "payload"), USUAL.values(), ids=USUAL)
async def test_nonsense_of_a_replica_loses_no_request_there_or_at_another_one(
    router: Routed,
    first: FakeReplica,
    second: FakeReplica,
    kind: int,
    payload: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = (router.dataplane.infer(text_request(str(each))) for each in range(2))
    with one, two:
        await until(lambda: bool(first.calls and second.calls))
        first.offers = NO_OFFERS
        first.send(kind, payload)
        await until(lambda: len(second.calls) == 2)
        for call in second.calls:
            second.answer(call, second.requests[call].inputs[0].elements()[0].decode())
        texts = {text(await soon(each.only())) for each in (one, two)}
    assert texts == {b"0", b"1"}
    assert len(second.links) == 1
    assert sums(router)["retries"] == 1
    second.calls.clear()
    assert await answered(router, second) is second
    (reason,) = (each.__dict__["reason"] for each in caplog.records if each.msg == "replica lost")
    assert reason.startswith("its announcements cannot be used: ")
