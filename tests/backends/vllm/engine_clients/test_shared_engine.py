"""The real engine with two clients: as one engine to every request, and at its end."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from tempfile import gettempdir

import psutil
import pytest
import pytest_asyncio

from backends.vllm.backend import VllmBackend
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.openai_contract import OpenAiRefusal
from tests.backends.vllm.conftest import (
    ANSWER,
    CONTEXT,
    Llama,
    Shared,
    Write,
    ask,
    engine_marks,
    loaded,
    openai,
    strings,
)
from tests.backends.vllm.engine_forks import engines_fork
from tests.backends.vllm.processes import clients, engine_processes, leaves_nothing, zmq_threads
from tests.builders import death_of, soon

pytestmark = engine_marks

CLIENTS = 2
MOST_REQUESTS = 8
IN_TRANSIT = 2
FEW = 5
ONE_CORE = max(os.sched_getaffinity(0))
GREEDY = {"temperature": 0, "max_tokens": 16}
ENDLESS = {"stream": True, "max_tokens": CONTEXT, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], **GREEDY}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_pair(backend: VllmBackend, write: Write) -> AsyncIterator[Shared]:
    """An engine on one core with two clients and a limit of requests."""

    async def load() -> Llama:
        wasted: list[int] = []
        context = write(
            parameters={"REPORT_CUSTOM_METRICS": "true", "cpu_cores": str(ONE_CORE)},
            wasted=wasted.append,
            api_server_count=CLIENTS,
            max_num_queued_reqs=MOST_REQUESTS,
        )
        return await loaded(backend, context, wasted)

    shared = Shared(load)
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="session")
async def llama(shared_pair: Shared) -> AsyncIterator[Llama]:
    """The engine with two clients; it has no request before a test, nor after it."""
    found = await shared_pair.get()
    yield found
    await found.running(0)


@pytest_asyncio.fixture(loop_scope="session")
async def ended_pair(shared_pair: Shared) -> AsyncIterator[Llama]:
    """The engine with two clients, for a test that ends it."""
    found = await shared_pair.get()
    yield found
    await found.close()


def metrics_folders() -> Sequence[Path]:
    return list(Path(gettempdir()).glob("sluice-metrics-*"))


async def test_many_at_once_get_the_answer_that_one_alone_gets(llama: Llama) -> None:
    assert await llama.say(ask(exclude_input_in_output=True, **GREEDY)) == ANSWER
    asked = [llama.say(ask(stream=True, **GREEDY)) for _ in range(6)]
    assert await soon(asyncio.gather(*asked)) == [ANSWER] * 6


async def test_openais_requests_are_answered_streamed_and_whole(llama: Llama) -> None:
    whole = await llama.whole(openai(CHAT))
    chunks = await llama.chunks(openai({**CHAT, "stream": True}))
    assert whole["choices"][0]["message"]["content"] == ANSWER
    deltas = [each["choices"][0]["delta"].get("content") or "" for each in chunks]
    assert "".join(deltas) == ANSWER


async def test_metrics_of_all_clients_are_added_up(llama: Llama) -> None:
    counted = ("vllm:generation_tokens_total", "vllm:request_success_total")
    before = [llama.metric(name) for name in counted]
    asked = [llama.say(ask(ignore_eos=True, **GREEDY)) for _ in range(4)]
    await soon(asyncio.gather(*asked))
    after = [llama.metric(name) for name in counted]
    assert [now - then for then, now in zip(before, after, strict=True)] == [4 * 16, 4]
    assert llama.metric("vllm:time_per_output_token_seconds_count") > 0
    labels = {
        (sample.labels["model"], sample.labels["version"])
        for family in llama.instance.metrics
        for sample in family.samples
    }
    assert labels == {("llama", "1")}


async def test_each_client_has_some_of_the_requests(llama: Llama) -> None:
    """Two that run at the same time are read by two processes, which both use processor time."""

    def used() -> list[float]:
        return [sum(each.cpu_times()[:2]) for each in clients()]  # in steps of 10 ms

    async def ask_until_each_has_more() -> None:
        while not all(now > then for now, then in zip(used(), before, strict=True)):
            both = (ask(stream=True, max_tokens=32, ignore_eos=True) for _ in range(CLIENTS))
            await asyncio.gather(*map(llama.say, both))

    before = used()
    assert len(before) == CLIENTS
    await soon(ask_until_each_has_more())


async def test_a_refusal_comes_with_openais_status_and_body(llama: Llama) -> None:
    with pytest.raises(OpenAiRefusal) as caught:
        await llama.answers(openai({**CHAT, "top_logprobs": 99, "logprobs": True}))
    assert caught.value.status == 400
    assert b"BadRequestError" in caught.value.body


async def test_a_refusal_is_that_of_one_client(llama: Llama) -> None:
    with pytest.raises(InferenceError, match="temperature must be non-negative") as caught:
        await llama.answers(ask(temperature=-1))
    assert caught.value.code is Code.INVALID_ARG


async def test_a_cancelled_request_is_aborted_and_its_tokens_are_wasted(llama: Llama) -> None:
    leaving = [asyncio.create_task(llama.answers(ask(**ENDLESS))) for _ in range(CLIENTS)]
    await llama.running(CLIENTS)
    for task in leaving:
        task.cancel()
    await soon(asyncio.wait(leaving))
    await llama.running(0)


async def test_unread_tokens_of_a_cancelled_request_are_wasted(llama: Llama) -> None:
    """On a busy machine tokens may be on their way from the engine: later tries wait longer."""
    for wait_secs in (0.5, 1.0, 2.0, 4.0):
        made, wasted = await unread(llama, wait_secs)
        if made > FEW and made - 1 - wasted <= IN_TRANSIT:
            break
    assert made > FEW
    assert wasted == pytest.approx(made - 1, abs=IN_TRANSIT)


async def unread(llama: Llama, wait_secs: float) -> tuple[float, int]:
    """The tokens that a request makes until it is cancelled, and those reported as wasted."""
    del llama.wasted[:]
    before = llama.metric("vllm:generation_tokens_total")
    async with aclosing(llama.instance.execute([ask(**ENDLESS)])) as answers:
        await soon(anext(answers))
        await asyncio.sleep(wait_secs)
    await llama.running(0)
    return llama.metric("vllm:generation_tokens_total") - before, sum(llama.wasted)


async def test_the_contract_is_offered_as_the_engine_has_it(llama: Llama) -> None:
    assert llama.instance.max_model_len == CONTEXT
    assert llama.instance.adapters == ()


async def test_an_engine_without_adapters_refuses_one(llama: Llama) -> None:
    with pytest.raises(InferenceError, match="LoRA feature is not enabled"):
        await llama.answers(ask(lora_name="x"))


async def test_the_cores_of_an_engine_are_not_those_of_its_clients(llama: Llama) -> None:
    here = sorted(os.sched_getaffinity(0))
    assert [each.cpu_affinity() for each in clients()] == [here] * CLIENTS
    assert llama.process("EngineCore").cpu_affinity() == [ONE_CORE]


async def test_a_limit_of_requests_is_that_of_all_clients_together(llama: Llama) -> None:
    """Requests over the limit come later: at the same moment each client may admit one more."""
    enough = asyncio.Event()
    asked = [asyncio.create_task(said(llama, enough)) for _ in range(MOST_REQUESTS)]
    await llama.running(MOST_REQUESTS)
    more = [llama.say(ask(**ENDLESS)) for _ in range(3)]
    refused = await soon(asyncio.gather(*more, return_exceptions=True))
    assert [getattr(each, "code", each) for each in refused] == [Code.UNAVAILABLE] * 3
    enough.set()
    texts = await soon(asyncio.gather(*asked))
    assert [each.startswith(ANSWER) for each in texts] == [True] * MOST_REQUESTS
    await llama.running(0)
    assert await soon(llama.say(ask(stream=True, **GREEDY))) == ANSWER


async def said(llama: Llama, enough: asyncio.Event) -> str:
    """The text of an endless request until it is enough, at least as long as the answer."""
    text = ""
    async with aclosing(llama.instance.execute([ask(temperature=0, **ENDLESS)])) as answers:
        async for _, answer in answers:
            assert isinstance(answer, InferResponse)
            text += strings(answer, "text_output")[0]
            if enough.is_set() and len(text) >= len(ANSWER):
                break
    return text


async def test_a_client_that_ends_while_the_engine_starts_ends_the_start(write: Write) -> None:
    others, engines, threads = set(clients()), set(engine_processes()), zmq_threads()
    with engines_fork():
        loading = asyncio.create_task(VllmBackend().load(write(api_server_count=CLIENTS)))
        async with asyncio.timeout(60):
            while not (mine := set(clients()) - others):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
            mine.pop().kill()
            with pytest.raises(InferenceError, match=r"client [01]"):
                await loading
    assert set(clients()) == others
    # The engine has been killed; the system may take a moment to end so large a process.
    async with asyncio.timeout(20):
        while set(engine_processes()) != engines:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
    assert zmq_threads() == threads


@pytest.mark.release
async def test_an_engine_that_does_not_start_names_its_last_error_and_leaves_nothing(
    write: Write,
) -> None:
    context = write(kv_cache_memory_bytes=1000, api_server_count=CLIENTS)
    error = await leaves_nothing(context, InferenceError)
    assert error.startswith("model 'llama': its engine did not start: ValueError: No avail")


async def failure(llama: Llama, request: InferRequest) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await llama.answers(request)
    return caught.value


async def test_the_death_of_a_client_is_that_of_its_engine_and_nothing_is_left(
    ended_pair: Llama,
) -> None:
    llama, mine = ended_pair, clients()
    assert len(mine) == CLIENTS
    folders = set(metrics_folders())
    died = asyncio.create_task(death_of(llama.instance))
    failures = [asyncio.create_task(failure(llama, ask(**ENDLESS))) for _ in range(CLIENTS)]
    await llama.running(CLIENTS)
    mine[0].kill()
    assert "of its engine ended (exit code -9)" in await soon(died)
    async with asyncio.timeout(15):
        await llama.close()
    errors = await soon(asyncio.gather(*failures))
    assert {(error.dead_instance, error.message) for error in errors} == {
        (0, "model 'llama': its engine has stopped; retry shortly")
    }
    processes = [*mine, *llama.processes]
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=5)
    assert alive == clients() == []
    assert len(folders - set(metrics_folders())) == 1
