"""An engine that is killed: everybody hears of it at once, and nothing is left."""

import asyncio
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from backends.vllm.backend import VllmBackend
from gateway.errors import Code, InferenceError
from tests.backends.vllm.conftest import CONTEXT, Llama, Write, ask, engine_processes
from tests.builders import soon

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\."),
]

KNOWN_SECS = 2.0
"""How soon a dead engine must be known."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llama(write: Write) -> AsyncIterator[Llama]:
    """An engine that the test kills, and closes."""
    yield Llama(await VllmBackend().load(write()))
    psutil.wait_procs(engine_processes(), timeout=5)
    assert engine_processes() == []


async def failure(llama: Llama, *, stream: bool) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await llama.answers(ask(stream=stream, max_tokens=CONTEXT, ignore_eos=True))
    return caught.value


async def test_its_death_is_known_its_requests_fail_and_closing_is_quick(llama: Llama) -> None:
    died = asyncio.create_task(llama.instance.died())
    failures = [asyncio.create_task(failure(llama, stream=stream)) for stream in (True, False)]
    async with asyncio.timeout(10):
        while llama.metric("vllm:num_requests_running") < 2:  # noqa: ASYNC110 - a gauge
            await asyncio.sleep(0.01)
    core = next(each for each in engine_processes() if "EngineCore" in each.name())
    core.kill()
    began = time.monotonic()

    assert (await soon(died)).startswith("its engine has stopped")
    errors = await soon(asyncio.gather(*failures))
    assert time.monotonic() - began < KNOWN_SECS
    errors.append(await soon(failure(llama, stream=True)))
    assert {error.code for error in errors} == {Code.UNAVAILABLE}
    assert {error.message for error in errors} == {
        "model 'llama': its engine has stopped; retry shortly"
    }
    await soon(llama.instance.close())
