"""Requests of vLLM's handlers to the engine are passed on, counted, and ended."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gateway.messages import Usage
from tests.backends.vllm.serving.conftest import Output, ScriptedEngine, made
from tests.builders import settle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

NewId = Callable[[], str]


@dataclass
class Sampling:
    """Stands for SamplingParams."""

    n: int = 1
    stop: list[str] = field(default_factory=list)
    bad_words: None = None
    logit_bias: None = None
    allowed_token_ids: None = None
    stop_token_ids: None = None
    structured_outputs: Any = None


def exchange(engine: ScriptedEngine, new_id: NewId, wasted: list[int] | None = None) -> Any:
    from backends.vllm.serving.exchange import Exchange

    return Exchange(engine, new_id, [].append if wasted is None else wasted.append)


async def test_everything_but_the_requests_is_the_engines_own(numbered: NewId) -> None:
    engine = ScriptedEngine()
    assert exchange(engine, numbered).errored is engine.errored


async def test_a_request_is_passed_on_under_an_id_of_its_own(numbered: NewId) -> None:
    engine = ScriptedEngine([made(1, "stop")])
    sampling = Sampling()
    async with exchange(engine, numbered) as exchanged:
        outputs = [
            output
            async for output in exchanged.generate(
                "prompt", sampling, "the client's", lora_request="odd", priority=3
            )
        ]
    assert len(outputs) == 1
    assert engine.added == [("1", "prompt", sampling, {"lora_request": "odd", "priority": 3})]
    assert engine.aborted == []


async def test_tokens_are_counted_once_each(numbered: NewId) -> None:
    engine = ScriptedEngine([made(1), made(2), made(1, "length")])
    async with exchange(engine, numbered) as exchanged:
        generation = exchanged.generate("prompt", Sampling(), "id")
        await anext(generation)
        assert exchanged.usage(final=False) == Usage(prompt_tokens=3, completion_tokens=1)
        assert not exchanged.finished
        await anext(generation)
        await anext(generation)
        assert exchanged.finished
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
        assert exchanged.usage(final=True) == Usage(0, 3, "length")


async def test_the_tokens_of_every_sequence_and_prompt_count(numbered: NewId) -> None:
    both = Output([*made(2, "stop").outputs, *made(5, "length", 1).outputs], finished=True)
    engine = ScriptedEngine([both], [made(1, "stop")])
    async with exchange(engine, numbered) as exchanged:
        generations = [exchanged.generate(each, Sampling(n=2), "id") for each in ("a", "b")]
        for generation in generations:
            await anext(generation)
    assert exchanged.usage(final=True) == Usage(6, 8, "stop")


async def test_cached_tokens_of_all_prompts_are_counted_once(numbered: NewId) -> None:
    engine = ScriptedEngine(
        [replace(made(1), num_cached_tokens=2), replace(made(1, "stop"), num_cached_tokens=2)],
        [replace(made(1), num_cached_tokens=1)],
    )
    async with exchange(engine, numbered) as exchanged:
        generations = [exchanged.generate(each, Sampling(), "id") for each in ("a", "b")]
        for generation in generations:
            await anext(generation)
        assert exchanged.usage(final=False).cached_tokens == 3
        await anext(generations[0])
        assert exchanged.usage(final=False).cached_tokens is None


async def test_prompts_that_continue_one_are_not_the_clients(numbered: NewId) -> None:
    engine = ScriptedEngine([made(1, "length")], [made(1, "length")])
    async with exchange(engine, numbered) as exchanged:
        for _ in range(2):
            async for _ in exchanged.generate("beam", Sampling(), "id"):
                pass
    assert exchanged.usage(final=True) == Usage(3, 2, "length")


async def test_a_stream_begins_with_what_the_engine_makes_first(numbered: NewId) -> None:
    engine = ScriptedEngine([made(1), made(2, "stop")])
    async with exchange(engine, numbered) as exchanged:
        generation = exchanged.generate("prompt", Sampling(), "id")
        assert not exchanged.begun
        await exchanged.begin()
        assert exchanged.begun
        assert [len(each.outputs[0].token_ids) async for each in generation] == [1, 2]
    assert len(engine.added) == 1


async def test_a_refusal_of_the_engine_is_raised_before_a_stream_begins(numbered: NewId) -> None:
    from vllm.exceptions import VLLMValidationError

    engine = ScriptedEngine(VLLMValidationError("too long"))  # type: ignore[arg-type]
    async with exchange(engine, numbered) as exchanged:
        exchanged.generate("prompt", Sampling(), "id")
        with pytest.raises(VLLMValidationError, match="too long"):
            await exchanged.begin()
    assert isinstance(exchanged.failure, VLLMValidationError)


async def test_an_output_that_failed_is_vllms_own_error(numbered: NewId) -> None:
    from vllm.exceptions import GenerationError, VLLMValidationError

    failures = [made(0, "error")], [made(0, "error")]
    async with exchange(ScriptedEngine(*failures), numbered) as exchanged:
        with pytest.raises(GenerationError, match="the engine failed"):
            await anext(exchanged.generate("prompt", Sampling(), "id"))
        constrained = Sampling(structured_outputs=Constraint(regex="a"))
        with pytest.raises(VLLMValidationError, match="cannot follow"):
            await anext(exchanged.generate("prompt", constrained, "id"))


async def test_cancelling_the_exchange_ends_every_request_and_wastes_its_tokens(
    numbered: NewId,
) -> None:
    wasted: list[int] = []
    engine = ScriptedEngine([made(2), made(3)], [made(1, "stop")], [made(4)])

    async def leave() -> None:
        async with exchange(engine, numbered, wasted) as exchanged:
            generations = [exchanged.generate("prompt", Sampling(), "id") for _ in range(3)]
            for generation in generations:
                await anext(generation)
            assert exchanged.usage(final=False).completion_tokens == 7
            await anext(generations[0])
            await anext(generations[0])

    leaving = asyncio.create_task(leave())
    await settle()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert engine.aborted == ["1", "3"]
    assert sum(wasted) == 3


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(n=65), "n is 65, expected at most 64"),
        (Sampling(stop=["x"] * 65), "the number of strings in stop is 65, expected at most 64"),
        (Sampling(stop=["x" * 1025]), "the length of a string in stop is 1025"),
    ],
)
async def test_too_much_is_refused_before_the_engine_hears_of_it(
    numbered: NewId, sampling: Sampling, said: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    engine = ScriptedEngine()
    async with exchange(engine, numbered) as exchanged:
        with pytest.raises(VLLMValidationError, match=said):
            exchanged.generate("prompt", sampling, "id")
    assert engine.added == []


async def test_as_much_as_is_allowed_is_passed_on(numbered: NewId) -> None:
    async with exchange(ScriptedEngine(), numbered) as exchanged:
        exchanged.generate("prompt", Sampling(n=64, stop=["x" * 1024] * 64), "id")
        exchanged.generate("prompt", Sampling(structured_outputs=Constraint("x" * 65000)), "id")


async def test_a_grammar_that_takes_a_minute_to_compile_is_refused(numbered: NewId) -> None:
    from vllm.exceptions import VLLMValidationError

    huge = Sampling(structured_outputs=Constraint("x" * (1 << 16)))
    async with exchange(ScriptedEngine(), numbered) as exchanged:
        with pytest.raises(VLLMValidationError, match="the size of the grammar in bytes is 65538"):
            exchanged.generate("prompt", huge, "id")


async def test_a_request_has_a_limit_of_prompts(numbered: NewId) -> None:
    from vllm.exceptions import VLLMValidationError

    async with exchange(ScriptedEngine(), lambda: "id") as exchanged:
        for _ in range(2048):
            exchanged.encode("prompt", None, "id")
        with pytest.raises(VLLMValidationError, match="more than the 2048 prompts"):
            exchanged.encode("prompt", None, "id")


@dataclass
class Constraint:
    """Stands for StructuredOutputsParams."""

    regex: str
    json: None = None
    choice: None = None
    grammar: None = None
    structural_tag: None = None
