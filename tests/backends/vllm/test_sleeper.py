"""The levels of vLLM's sleep, against an engine that stands in for one on a GPU: none was used."""

import asyncio
import inspect
import sys
from importlib import import_module
from typing import Any

import pytest

from backends.vllm.engine_processes import Watch
from backends.vllm.settings import engine_sleep
from backends.vllm.sleeper import LEVELS, EngineSleeper
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from tests.builders import soon

WEIGHTS, CACHE = 14, 40
CALLS = {
    "level_1": [("sleep", (), {"level": 1, "mode": "wait"}), ("wake_up", (), {})],
    "level_2": [
        ("sleep", (), {"level": 2, "mode": "wait"}),
        ("wake_up", (["weights"],), {}),
        ("collective_rpc", ("reload_weights",), {}),
        ("wake_up", (["kv_cache"],), {}),
    ],
}


class StandInEngine:
    """An engine that counts its memory as vLLM's allocator does; `sane` while answers are."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        self.gpu = {"weights": WEIGHTS, "kv_cache": CACHE}
        self.pinned = 0
        self.sane = True

    async def sleep(self, *given: Any, **named: Any) -> None:
        self.calls.append(("sleep", given, named))
        self.gpu.clear()
        self.pinned = WEIGHTS if named["level"] == 1 else 0

    async def wake_up(self, *given: Any, **named: Any) -> None:
        self.calls.append(("wake_up", given, named))
        tags = given[0] if given else ["weights", "kv_cache"]
        sizes = {"weights": WEIGHTS, "kv_cache": CACHE}
        self.gpu |= {tag: sizes[tag] for tag in tags}
        if not self.pinned:
            self.sane = False  # the memory of the weights is back, but not their values

    async def collective_rpc(self, *given: Any, **named: Any) -> None:
        self.calls.append(("collective_rpc", given, named))
        assert self.gpu == {"weights": WEIGHTS}, "weights are loaded before the cache takes memory"
        self.sane = self.pinned == 0


@pytest.mark.parametrize("level", LEVELS)
async def test_an_engine_sleeps_and_wakes_by_the_calls_of_its_level(level: str) -> None:
    engine = StandInEngine()
    sleeper = EngineSleeper(engine, Watch(()), LEVELS[level])
    await soon(sleeper.sleep())
    assert engine.gpu == {}
    assert engine.pinned == (WEIGHTS if level == "level_1" else 0)
    await soon(sleeper.wake())
    assert engine.gpu == {"weights": WEIGHTS, "kv_cache": CACHE}
    assert engine.calls == CALLS[level]


async def test_the_wake_of_an_engine_that_dies_meanwhile_fails() -> None:
    watch, engine = Watch(()), StandInEngine()
    engine.wake_up = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    sleeper = EngineSleeper(engine, watch, 1)
    watch.report("its engine has stopped")
    with pytest.raises(InferenceError, match="its engine has stopped"):
        await soon(sleeper.wake())


@pytest.mark.parametrize(("value", "found"), [("", 0), ("unload", 0), ("level_2", 2)])
def test_the_level_is_that_of_the_parameter(value: str, found: int) -> None:
    config = ModelConfig(name="llama", parameters={"sleep": value} if value else {})
    assert engine_sleep(config) == found


@pytest.mark.vllm
def test_vllm_has_the_calls_with_these_arguments(backend: Any) -> None:
    assert "vllm" in sys.modules
    llm = import_module("vllm.v1.engine.async_llm").AsyncLLM
    for name, given, named in (each for calls in CALLS.values() for each in calls):
        inspect.signature(getattr(llm, name)).bind(None, *given, **named)
