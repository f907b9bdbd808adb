"""Sessions at a router with real ports of replicas, whose stand-in LLM has a prefix cache."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.dataplane import DataPlane
from gateway.fleet import announcer
from gateway.fleet.handshake import FleetKind
from gateway.fleet.keys import PrefixScope
from gateway.fleet.prompts import keys_of_fleet
from gateway.fleet.replica import FleetPort
from gateway.models.model import Model
from gateway.processes.channel import Channel
from gateway.server import Listeners
from gateway.settings import FleetSettings
from loadtests.caching_llm import TOKEN_BYTES, CachingLlm
from tests.builders import LoadedModels, soon, text_request
from tests.conftest import Serve
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.routing import Routed, routing

SESSIONS, TURNS, TURN_BYTES = 24, 4, 3000
KEY = ("text", 1)


class Hosted(LoadedModels):
    """The models of a replica; a test replaces one by another."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.news = asyncio.Event()

    def replace(self, model: Model) -> None:
        self._models = (model,)
        self.news.set()

    async def changed(self) -> None:
        """Wait until the model is another one."""
        await self.news.wait()
        self.news.clear()


class Hosting:
    """The open port of a replica."""

    def __init__(self, fleet_port: FleetPort, hosted: Hosted) -> None:
        self.fleet_port = fleet_port
        self.hosted = hosted

    @property
    def port(self) -> int:
        return self.fleet_port.ports["fleet"]


@asynccontextmanager
async def hosting(model: Model) -> AsyncIterator[Hosting]:
    hosted = Hosted(model)
    control: Any = hosted
    server: Any = SimpleNamespace(dataplane=DataPlane(control))
    port = FleetPort(server, Listeners(), FleetSettings(port=0))
    await port.bind()
    async with asyncio.TaskGroup() as tasks:
        await port.open(tasks)
        yield Hosting(port, hosted)
        port.stop_accepting(tasks, 0.01)
        port.stop_waiting(tasks, 0.01)


@asynccontextmanager
async def fleet(folder: Path, serve: Serve, *llms: CachingLlm) -> AsyncIterator[Routed]:
    """A router of one replica for each LLM."""
    async with AsyncExitStack() as owner:
        hosts = [await owner.enter_async_context(hosting(serve(each))) for each in llms]
        yield await owner.enter_async_context(routing(folder, *hosts))


def llm() -> CachingLlm:
    return CachingLlm(100_000, 2e5)


async def warm_up(routed: Routed, llms: Sequence[CachingLlm]) -> None:
    """Let the replicas measure their rates, and count from now on."""
    for number in range(10):
        texts = (f"{number}{place}" * 700 for place in range(len(llms)))
        await soon(asyncio.gather(*(_ask(routed, text) for text in texts)))
    for each in llms:
        each.prompt_tokens = each.cached_tokens = 0


async def converse(routed: Routed, seed: int) -> None:
    """Sessions with a common beginning of eight; a turn of each, then the next turn."""
    chance = Random(seed)
    common = [_words(chance, TURN_BYTES) for _ in range(3)]
    prompts = [common[number % 3] for number in range(SESSIONS)]
    for _ in range(TURNS):
        order = list(range(SESSIONS))
        chance.shuffle(order)
        for number in order:
            prompts[number] += _words(chance, TURN_BYTES)
            await soon(_ask(routed, prompts[number]))
            # The answer has been read before the next turn.
            await until(
                lambda: not any(each.loads[KEY].ahead for each in routed.router.connections)
            )


def _words(chance: Random, size: int) -> str:
    return "".join(chance.choices("abcdefgh ", k=size))


async def _ask(routed: Routed, prompt: str) -> int:
    with routed.dataplane.infer(text_request(prompt)) as stream:
        (text,) = (await stream.only()).outputs[0].elements()
    cached: int = json.loads(text)["cached"]
    return cached


def share(llms: Sequence[CachingLlm]) -> float:
    """The cached share of all prompts."""
    return sum(each.cached_tokens for each in llms) / sum(each.prompt_tokens for each in llms)


async def test_two_replicas_find_nearly_as_much_in_their_caches_as_one(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "LOAD_SECS", 0.001)
    one, pair = [llm()], [llm(), llm()]
    async with fleet(tmp_path, serve, *one) as routed:
        await warm_up(routed, one)
        await converse(routed, 1)
    async with fleet(tmp_path, serve, *pair) as routed:
        await warm_up(routed, pair)
        sent = _frames(monkeypatch)
        await converse(routed, 1)
    assert 0.5 < share(one) < 0.8
    assert share(pair) >= 0.9 * share(one)
    prefixes = sum(len(payload) for kind, payload in sent if kind == FleetKind.PREFIXES)
    new_bytes = sum(each.prompt_tokens - each.cached_tokens for each in pair) * TOKEN_BYTES
    assert 0.0078 * new_bytes < prefixes < 0.013 * new_bytes


def _frames(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    """The kinds and payloads of all frames that are sent from now on."""
    sent = []
    send = Channel.send

    def sending(channel: Channel, kind: int, call: int = 0, payload: bytes = b"") -> None:
        sent.append((kind, payload))
        send(channel, kind, call, payload)

    monkeypatch.setattr(Channel, "send", sending)
    return sent


async def test_a_new_router_gets_all_prefixes_and_those_of_a_reloaded_model_are_forgotten(
    tmp_path: Path, serve: Serve
) -> None:
    async with hosting(serve(llm())) as host, routing(tmp_path, host) as first:
        for _ in range(2):
            await _ask(first, "a" * 5000)
        await until(lambda: _keys(first) == keys_of("a" * 5000))
        async with routing(tmp_path, host) as second:
            await until(lambda: _keys(second) == keys_of("a" * 5000))
            host.hosted.replace(serve(llm()))
            await _ask(second, "b" * 5000)
            for each in (first, second):
                await until(lambda each=each: _keys(each) == keys_of("b" * 5000))
            assert await _ask(first, "b" * 5000) > 0


async def test_a_prompt_is_announced_to_other_routers_at_once(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = CachingLlm(100_000, 5000.0)
    async with (
        hosting(serve(slow)) as host,
        routing(tmp_path, host) as first,
        routing(tmp_path, host) as second,
    ):
        for text in ("a" * 400, "b" * 400):
            await _ask(first, text)
        (other,) = second.router.connections
        await until(lambda: other.loads[KEY].load.prefill_rate > 0)
        monkeypatch.setattr(announcer, "LOAD_SECS", 60.0)
        asked = asyncio.create_task(_ask(first, "c" * 4000))
        await until(lambda: other.loads[KEY].load.waiting_tokens >= 900)
        assert not asked.done()
        await soon(asked)


def _keys(routed: Routed) -> set[bytes]:
    """The prefixes that a router knows of all replicas."""
    return set(routed.router._indexes[KEY]._holders)  # noqa: SLF001 - nothing shows them


def keys_of(text: str) -> set[bytes]:
    scope = PrefixScope(model="text", version="1")
    return set(keys_of_fleet("sluice", b"").of_text(scope, text))
