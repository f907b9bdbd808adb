"""An engine that is killed: all its requests fail at once, and nothing remains."""

import asyncio
import time

import psutil
import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from tests.backends.vllm.conftest import CONTEXT, Llama, ask, engine_marks, openai
from tests.builders import death_of, soon

pytestmark = engine_marks

KNOWN_SECS = 2.0
"""The time in which a dead engine must be known."""
CLOSED_SECS = 15.0
"""The time that the close of a dead engine may take; vLLM waits for its processes."""


async def failure(llama: Llama, request: InferRequest) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await llama.answers(request)
    return caught.value


def requests() -> list[InferRequest]:
    """One of each kind that takes long."""
    messages = [{"role": "user", "content": "Count."}]
    body = {"messages": messages, "max_tokens": CONTEXT - 100, "ignore_eos": True}
    return [
        *(ask(stream=stream, max_tokens=CONTEXT, ignore_eos=True) for stream in (True, False)),
        *(openai({**body, "stream": stream}) for stream in (True, False)),
    ]


async def test_its_death_is_known_its_requests_fail_and_it_can_be_closed(
    ended_llama: Llama,
) -> None:
    llama = ended_llama
    died = asyncio.create_task(death_of(llama.instance))
    failures = [asyncio.create_task(failure(llama, request)) for request in requests()]
    await llama.running(4)
    llama.process("EngineCore").kill()
    began = time.monotonic()

    assert (await soon(died)).startswith("its engine has stopped")
    errors = await soon(asyncio.gather(*failures))
    assert time.monotonic() - began < KNOWN_SECS
    errors += [await soon(failure(llama, request)) for request in requests()]
    assert {(error.code, error.dead_instance) for error in errors} == {(Code.UNAVAILABLE, 0)}
    assert {error.message for error in errors} == {
        "model 'llama': its engine has stopped; retry shortly"
    }
    async with asyncio.timeout(CLOSED_SECS):
        await llama.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, llama.processes, timeout=5)
    assert alive == []
