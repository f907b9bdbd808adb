"""Chunks past vLLM's handlers are byte for byte those of the handlers, from the same outputs."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.messages import InferRequest, InferResponse
from tests.backends.vllm.conftest import Llama, ask, engine_marks, openai, strings
from tests.backends.vllm.serving.outputs import (
    STOPS,
    Reader,
    answered,
    compare,
    completion_tokens,
    generated,
    options,
    recorded,
    text_of,
)

pytestmark = engine_marks

QUESTION = [{"role": "user", "content": "Hi"}]
CHAT = ({"messages": QUESTION}, "chat/completions")
TEXT = ({"prompt": "Once"}, "completions")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
RUNS = 25
OUTPUTS = "gateway_vllm_outputs"
TOTAL = "gateway_vllm_outputs_total"
both = pytest.mark.parametrize("asked", [CHAT, TEXT], ids=["chat", "completions"])
slowly = pytest.mark.parametrize("slow", [False, True], ids=["a reader", "a slow reader"])


def streamed(asked: tuple[dict[str, Any], str], **members: Any) -> InferRequest:
    """A request for a stream of one of OpenAI's endpoints."""
    body, endpoint = asked
    given = {**body, "stream": True, "max_tokens": 99, **members}
    return replace(openai(given, endpoint), id="a")


async def compare_runs(llama: Llama, request: InferRequest, *, slow: bool, runs: int = RUNS) -> int:
    """Answer a request both ways for many generated outputs; the number that was diverted."""
    count = 0
    for seed in range(runs):
        chance = random.Random(seed)
        steps = generated(llama, chance)
        count += await compare(llama, request, steps, rooms=chance if slow else None)
    return count


@slowly
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"stop": STOPS},
        {"stop": ["b"], "include_stop_str_in_output": True, "min_tokens": 3},
        {"stop": STOPS, "include_stop_str_in_output": True, "ignore_eos": True},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"echo": True},
    ],
    ids=str,
)
@both
async def test_chunks_are_those_of_vllms_handlers(
    llama: Llama, asked: tuple[dict[str, Any], str], members: dict[str, Any], slow: bool
) -> None:
    assert await compare_runs(llama, streamed(asked, **members), slow=slow) > RUNS


@pytest.mark.parametrize(
    "wishes",
    options(include_usage=[False, True], continuous_usage_stats=[False, True]),
    ids=str,
)
@both
async def test_usage_is_that_of_vllms_handlers(
    llama: Llama, asked: tuple[dict[str, Any], str], wishes: dict[str, bool]
) -> None:
    request = streamed(asked, stream_options=wishes)
    diverted = await compare_runs(llama, request, slow=True, runs=RUNS // 3)
    assert (diverted == 0) == wishes.get("continuous_usage_stats", False)


@pytest.mark.parametrize(
    ("asked", "members"),
    [
        (CHAT, {"tools": TOOLS}),
        (CHAT, {"return_token_ids": True}),
        (TEXT, {"return_token_ids": True}),
        (TEXT, {"n": 1, "logprobs": 1}),
    ],
)
async def test_chunks_with_more_than_a_text_are_made_by_the_handlers(
    llama: Llama, asked: tuple[dict[str, Any], str], members: dict[str, Any]
) -> None:
    reader = Reader()
    await reader.read(llama, streamed(asked, **members, max_tokens=4))
    assert (reader.put_count, reader.error) == (0, "")
    assert len(reader.found) > 1


@slowly
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"stop": list(STOPS)},
        {
            "return_finish_reason": True,
            "return_num_output_tokens": True,
            "return_num_input_tokens": True,
        },
    ],
)
async def test_texts_are_those_of_the_engines_outputs(
    llama: Llama, given: dict[str, Any], slow: bool
) -> None:
    request = ask("Once", stream=True, max_tokens=99, **given)
    assert await compare_runs(llama, request, slow=slow) > RUNS


async def test_recorded_outputs_become_the_same_chunks(llama: Llama) -> None:
    sampling = {"max_tokens": 40, "temperature": 2.0, "seed": 4, "min_tokens": 30}
    steps = await recorded(llama, streamed(CHAT, **sampling))
    assert len(steps) > 30
    asked = (streamed(CHAT), streamed(TEXT), ask("Once", stream=True, max_tokens=99))
    for request in asked:
        assert await compare(llama, request, steps, rooms=None) > 20


@both
async def test_outputs_of_a_busy_loop_stay_in_order(
    llama: Llama, asked: tuple[dict[str, Any], str]
) -> None:
    """Steps that follow each other within a turn are merged by vLLM, whose chunks are others."""
    diverted = 0
    for seed in range(RUNS):
        chance = random.Random(seed)
        steps = generated(llama, chance)
        request = streamed(asked, stop=STOPS, stream_options={"include_usage": True})
        expected = await answered(llama, request, steps, Reader(), diverts=False)
        reader = Reader(chance)
        found = await answered(llama, request, steps, reader, diverts=True, hurry=chance)
        assert found.error == expected.error
        if expected.error:  # vLLM merges the last texts with the failure
            assert text_of(expected.found).startswith(text_of(found.found))
        else:
            assert text_of(found.found) == text_of(expected.found)
            assert ends(found.found) == ends(expected.found)
            assert completion_tokens(found.found) == completion_tokens(expected.found)
        diverted += reader.put_count
    assert diverted > RUNS


def ends(responses: Sequence[InferResponse]) -> list[Any]:
    """The reasons for the end of a stream of chunks, and its usage."""
    chunks = [json.loads(strings(each, "openai_response")[0]) for each in responses]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = [(each["finish_reason"], each.get("stop_reason")) for each in choices]
    return [*filter(any, found), *(each["usage"] for each in chunks if each.get("usage"))]


async def test_a_request_with_log_probabilities_is_not_diverted(llama: Llama) -> None:
    reader = Reader()
    request = ask("Once", stream=True, max_tokens=4, logprobs=1, return_logprobs=True)
    await reader.read(llama, request)
    assert reader.put_count == 0
    assert all(strings(each, "logprobs") != ["null"] for each in reader.found)


async def test_the_engine_itself_diverts_all_but_the_first_and_the_last(llama: Llama) -> None:
    reader, before = Reader(), ways(llama)
    await reader.read(llama, ask("Once", stream=True, max_tokens=12, ignore_eos=True))
    assert reader.put_count == 10
    assert completion_tokens(reader.found) == 12
    assert ways(llama) == {"diverted": before["diverted"] + 10, "vllm": before["vllm"] + 2}


def ways(llama: Llama) -> dict[str, float]:
    """The outputs that the metrics of the instance count, by their way."""
    (family,) = [each for each in llama.instance.metrics if each.name == OUTPUTS]
    return {each.labels["way"]: each.value for each in family.samples if each.name == TOTAL}
