"""The work of an engine before its first request."""

import logging
from typing import Any

import pytest

from tests.backends.vllm.serving.conftest import ScriptedEngine, made

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def imported(store: object) -> None:
    """vLLM, imported as the gateway does it."""


class Prompts:
    """Stands for the renderer of prompts."""

    async def render_prompt(self, prompt: Any) -> Any:
        return {"rendered": prompt}


async def warm_up(engine: ScriptedEngine) -> None:
    from backends.vllm.opening import warm_up

    await warm_up(engine, Prompts(), model="llama")  # type: ignore[arg-type] # all it uses


async def test_one_token_is_made_with_its_log_probability() -> None:
    engine = ScriptedEngine([made(1, "length")])
    await warm_up(engine)
    ((_, prompt, parameters, _),) = engine.added
    assert prompt == {"rendered": [0]}
    assert (parameters.max_tokens, parameters.logprobs) == (1, 0)
    assert engine.aborted == []


async def test_a_model_that_takes_no_such_prompt_is_served_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "sluice.vllm"):
        await warm_up(ScriptedEngine([ValueError("it needs an image")]))
    (record,) = caplog.records
    assert (record.message, record.__dict__["reason"]) == (
        "engine not warmed up",
        "it needs an image",
    )


async def test_an_engine_that_fails_in_it_is_not_served() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    with pytest.raises(EngineDeadError):
        await warm_up(ScriptedEngine([EngineDeadError()]))
