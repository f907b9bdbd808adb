"""A router that is killed while streams run through it and through another one.

Each text is compared with that of an undisturbed run.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.conformance.models import with_parameters
from tests.conformance.test_fleet_relays import known
from tests.leaving import IN_FLIGHT
from tests.serving import (
    WAIT_SECS,
    Serving,
    replica,
    serving,
    static_fleet,
    wait_until,
    write_model,
)
from tests.stories import GENERATE, Story, check_whole
from tests.telling import TELLING

TOKENS, FEW_TOKENS, MANY_TOKENS, DELAY_US = 200, 20, 2_000, 50_000
DIRECT, RELAYED, LOST = 25, 10, 15
"""Streams of the router that stays: read there, or by the killed one; streams of that one."""


class Resumable(Story):
    """A stream that is read on behind its last event, at any router."""

    def __init__(self, number: int, tokens: int = TOKENS) -> None:
        super().__init__(2 * number, tokens)
        self.body["resumable"] = True
        self.status = 0
        self._event = ""

    async def read(self, client: httpx.AsyncClient) -> None:
        """Read the stream to its end, from its begin or behind the last event."""
        if self._event:
            asking = client.stream("GET", GENERATE, headers={"Last-Event-ID": self._event})
        else:
            asking = client.stream("POST", GENERATE, json=self.body)
        async with asking as answer:
            self.status = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    self._event = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    self.take(json.loads(line.removeprefix("data: ")))


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[tuple[Serving, Serving]]:
    """Two replicas of the model."""
    folder = tmp_path_factory.mktemp("killed")
    write_model(folder, "story", TELLING + with_parameters({"delay_us": DELAY_US}))
    with (
        replica(folder, "story", environment=environment) as first,
        replica(folder, "story", environment=environment) as second,
    ):
        yield first, second
    assert "Traceback" not in first.text + second.text


def begin(client: httpx.AsyncClient, stories: Iterable[Story]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(each.read(client)) for each in stories]


async def begun(stories: Iterable[Story]) -> None:
    for each in stories:
        await asyncio.wait_for(each.has_begun.wait(), WAIT_SECS)


async def leave(reading: Sequence[asyncio.Task[None]]) -> None:
    """Disconnect the clients of streams."""
    for each in reading:
        each.cancel()
        with suppress(asyncio.CancelledError):
            await each


async def test_a_killed_router_costs_other_streams_nothing_and_theirs_are_resumed_elsewhere(
    tmp_path: Path, pair: tuple[Serving, Serving]
) -> None:
    flags = "--fleet-port=0", static_fleet(*pair)
    direct = [Story(number, TOKENS) for number in range(DIRECT)]
    relayed = [Resumable(number) for number in range(100, 100 + RELAYED)]
    lost = [Resumable(number, MANY_TOKENS) for number in range(200, 200 + LOST)]
    limits = httpx.Limits(max_connections=None)
    with serving(tmp_path, *flags) as kept, serving(tmp_path, *flags) as killed:
        wait_until(lambda: known(kept, killed) and known(killed, kept), "both are known")
        async with (
            httpx.AsyncClient(base_url=kept.http, timeout=WAIT_SECS, limits=limits) as at_kept,
            httpx.AsyncClient(base_url=killed.http, timeout=WAIT_SECS, limits=limits) as at_killed,
        ):
            interrupted = begin(at_kept, relayed)
            await begun(relayed)
            await leave(interrupted)
            sizes = [len(each.text) for each in relayed]
            reading = begin(at_kept, direct)
            broken = begin(at_killed, [*relayed, *lost])
            await begun([*direct, *lost])
            await asyncio.to_thread(
                wait_until,
                lambda: all(
                    len(each.text) > size for each, size in zip(relayed, sizes, strict=True)
                ),
                "streams of the other router are read by the one to be killed",
            )
            assert not any(each.text == each.expected for each in [*direct, *relayed, *lost])
            killed.process.kill()
            ends = await asyncio.gather(*broken, return_exceptions=True)
            assert all(isinstance(each, httpx.HTTPError) for each in ends)
            await asyncio.gather(*reading, *begin(at_kept, relayed))
            assert check_whole(direct) == check_whole(relayed) == 0
            await asyncio.gather(*begin(at_kept, lost))
            assert {each.status for each in lost} == {404}
            assert all(each.expected.startswith(each.text) for each in lost)
            again = [Resumable(number, FEW_TOKENS) for number in range(200, 200 + LOST)]
            await asyncio.gather(*begin(at_kept, again))
            assert check_whole(again) == 0
    assert "Traceback" not in kept.text
    for each in pair:
        each.wait_metric(IN_FLIGHT, "story", 0)
